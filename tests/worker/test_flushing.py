"""A prefill worker's answers end when the store has them."""

import threading

from kvstore.worker.engine import Engine
from kvstore.worker.flushing import Flushing
from kvstore.worker.model import LoadedModel
from kvstore.worker.requests import Ended, Event, Request
from kvstore.worker.serving import EngineThread
from tests.worker.stores import Watched, prompt

WAIT_S = 60.0  # seconds: far beyond what anything here takes


def test_an_end_comes_after_the_stores_word(tiny: LoadedModel, store: Watched) -> None:
    seen: list[str] = []
    over = threading.Event()

    class Noted(Watched):
        def flush(self, timeout_s: float) -> bool:
            seen.append(f"flush of {len(self.committed)} commits")
            return super().flush(timeout_s)

    def listen(event: Event) -> None:
        if isinstance(event, Ended):
            seen.append("end")
            over.set()

    noted = Noted(store.inner)
    engine = EngineThread(Engine(tiny, noted))
    serving = Flushing(engine, noted)
    serving.submit(Request(prompt(40), 1), listen)
    assert over.wait(WAIT_S)
    assert seen == ["flush of 1 commits", "end"]
    assert serving.figures()["requests_total"] == 1
    serving.close()
    engine.close()
