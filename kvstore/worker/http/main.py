"""Makes an engine and serves it over HTTP until a signal: `kvstore worker`. `build` is the one place where the engine is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.clients.blocks import BlockStore
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.worker.engine import Engine, Options
from kvstore.worker.flushing import Flushing
from kvstore.worker.gpu.device import Gpu
from kvstore.worker.gpu.opening import find_gpu, move, open_in_pool, serves
from kvstore.worker.gpu.opening import open_alone as open_gpu_alone
from kvstore.worker.http.app import Settings
from kvstore.worker.http.server import Ending, serve
from kvstore.worker.model import LoadedModel, load_model
from kvstore.worker.opening import Opened, Portion, open_either, open_shared
from kvstore.worker.scheduler import DEFAULT_RUNNING, DEFAULT_STEP_TOKENS, Rules
from kvstore.worker.serving import MAX_WAITING, EngineThread
from kvstore.worker.standalone import StandaloneStore
from kvstore.worker.texts import Texts

PATIENCE_S = 30.0  # seconds a text waits for slots that other workers hold before it fails
ALONE_TEXTS = 2  # texts of the model's full length: what memory of its own holds where no daemon answers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is served, out of what.

    standalone_bytes   0: the store of the daemon at `address` (None: its usual socket). Else so much memory of its own
    or_alone           where no daemon answers, memory of its own for a few texts
    flushing           an answer ends only when its blocks are in the store: what a prefill worker does
    guarantee_bytes    of the daemon's memory, that no other worker takes from it        limit_bytes   the most that it holds; 0: no limit
    tails              prefixes are found to the token, not only to the block
    device             where it computes: "cpu", "cuda", "cuda:1"; "auto": on a GPU where there is one that serves the model
    """

    model: Path | None = None
    address: str | None = None
    standalone_bytes: int = 0
    or_alone: bool = False
    max_waiting: int = MAX_WAITING
    step_tokens: int = DEFAULT_STEP_TOKENS
    running: int = DEFAULT_RUNNING
    flushing: bool = False
    tails: bool = False
    guarantee_bytes: int = 0
    limit_bytes: int = 0
    device: str = "cpu"


@dataclass
class Built:
    """An engine that runs, and what belongs to it. `why_alone`: why its store is not the daemon's, where that was not asked for."""

    serving: EngineThread
    texts: Texts
    store: BlockStore
    shared: bool
    why_alone: str = ""
    on_gpu: bool = False

    def close(self) -> None:
        """Give everything back."""
        self.serving.close()
        self.store.close()


def build(plan: Plan) -> Built:
    """Load the model, open the store, start the engine. Raises ConfigError, InvalidArgument, Unavailable."""
    found = find_gpu(plan.device)
    loaded = load_model(plan.model)
    opened, gpu = _opened(plan, loaded, found)
    rules = Rules(step_tokens=plan.step_tokens, running=plan.running)
    try:
        if gpu is not None:
            move(loaded, gpu)
        options = Options(rules=rules, patience_s=PATIENCE_S, keep_logits=False, native=True, gpu=gpu)
        engine = Engine(loaded, opened.store, options)
    except BaseException:
        opened.store.close()
        raise
    return Built(EngineThread(engine, plan.max_waiting), Texts(loaded), opened.store, opened.shared, opened.why_alone, gpu is not None)


def run(plan: Plan, address: str, settings: Settings, ending: Ending, tell: Callable[[str], None]) -> None:
    """Serve on host:port until a signal. `tell` is given one line when it is ready. Raises what `build` and `serve` raise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    built = build(plan)
    named = settings if settings.name else Settings(built.texts.name, settings.api_key, settings.max_body_bytes)
    try:
        where = ("the daemon's store" if built.shared else "memory of its own") + (", on a GPU" if built.on_gpu else "")
        serving = Flushing(built.serving, built.store) if plan.flushing else built.serving
        serve(serving, built.texts, address, named, ending, lambda url: tell(f"{named.name} on {url}/v1, out of {where}"))
    finally:
        built.close()


def _opened(plan: Plan, loaded: LoadedModel, gpu: Gpu | None) -> tuple[Opened, Gpu | None]:
    """The store, and the GPU that it is on, where one is there that serves the model and for which there is a store."""
    portion = Portion(plan.guarantee_bytes, plan.limit_bytes, tails=plan.tails)
    if gpu is not None and serves(loaded, gpu, plan.device):
        try:
            if plan.standalone_bytes:
                return Opened(open_gpu_alone(loaded, gpu, plan.standalone_bytes), shared=False), gpu
            return Opened(open_in_pool(loaded, gpu, plan.address, "worker", portion), shared=True), gpu
        except (ConfigError, InvalidArgument) as error:
            if plan.device != "auto":
                raise
            log.warning("the GPU is left out: %s", error)
    if plan.standalone_bytes:
        alone = StandaloneStore(loaded.identity, loaded.geometry(), plan.standalone_bytes, tails=plan.tails)
        return Opened(alone, shared=False), None
    if plan.or_alone:
        return open_either(loaded, plan.address, ALONE_TEXTS * loaded.max_tokens), None
    return Opened(open_shared(loaded, plan.address, name="worker", portion=portion), shared=True), None
