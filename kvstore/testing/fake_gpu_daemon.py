"""`kvstore serve` on GPUs that are not there: the fake driver in the real one's place, in a process of its own. And how tests start it.

SIGUSR1 makes its next copy fail, SIGUSR2 loses the first GPU's context, SIGHUP has its copies never end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.cli.main import main as kvstore
from kvstore.testing.daemon import DaemonProcess
from kvstore.testing.fake_cuda import FakeCuda
from kvstore.tiers import hbm

# Variables of the daemon's process: how many GPUs, bytes of each, and whether their memory can be shared as descriptors only.
GPUS, GPU_BYTES, NO_DESCRIPTORS = "FAKE_GPUS", "FAKE_GPU_BYTES", "FAKE_GPU_NO_DESCRIPTORS"
TAKEN = "(the fake GPU has taken a signal)\n"
TAKEN_S = 60.0  # seconds: far beyond what a loaded machine takes
COPY_FAILED = 702  # status: CUDA_ERROR_LAUNCH_TIMEOUT


class GpuDaemon(DaemonProcess):
    """As DaemonProcess, with so many fake GPUs, of each of which it takes `hbm`."""

    def __init__(
        self,
        directory: Path | None = None,
        flags: Sequence[str] = (),
        *,
        hbm: str = "16MiB",
        gpus: int = 1,
        gpu_bytes: int = 1 << 30,
        descriptors: bool = True,
        **sizes: Any,
    ) -> None:
        super().__init__(directory, ["--hbm", hbm, *flags], **sizes)
        self.program = "kvstore.testing.fake_gpu_daemon"
        self.environment = {GPUS: str(gpus), GPU_BYTES: str(gpu_bytes)} | ({} if descriptors else {NO_DESCRIPTORS: "1"})

    def fail_copy(self) -> None:
        """The next copy of the daemon cannot be queued."""
        self._signal(signal.SIGUSR1)

    def lose_gpu(self) -> None:
        """The first GPU's context is lost."""
        self._signal(signal.SIGUSR2)

    def hang_gpu(self) -> None:
        """From now on no copy of the daemon ends."""
        self._signal(signal.SIGHUP)

    def _signal(self, number: signal.Signals) -> None:
        """Send it, and wait until it was taken."""
        said = self.log().count(TAKEN)
        os.kill(self.pid, number)
        ends_at = time.monotonic() + TAKEN_S
        while self.log().count(TAKEN) == said:
            if time.monotonic() > ends_at:
                raise RuntimeError(f"the daemon did not take signal {number.name}:\n{self.log()[-4000:]}")
            time.sleep(0.005)


class HangingCuda(FakeCuda):
    """After `hangs` is set nobody who waits for a copy goes on."""

    def __init__(self, devices: int, memory_bytes: int, descriptors: bool) -> None:
        super().__init__(devices, memory_bytes, descriptors)
        self.hangs = threading.Event()

    def wait(self, device: int, event: int) -> None:
        """See `CudaDriver`."""
        if self.hangs.is_set():
            threading.Event().wait()
        super().wait(device, event)


def main() -> int:
    """The program of the daemon's process."""
    environment = os.environ
    driver = HangingCuda(int(environment.get(GPUS, "1")), int(environment.get(GPU_BYTES, str(1 << 30))), NO_DESCRIPTORS not in environment)
    hbm.find_driver = lambda: driver
    _on(signal.SIGUSR1, lambda: driver.fail("copy", COPY_FAILED))
    _on(signal.SIGUSR2, lambda: driver.lose(0))
    _on(signal.SIGHUP, driver.hangs.set)
    return kvstore()


def _on(number: signal.Signals, act: Callable[[], None]) -> None:
    def handle(*_: object) -> None:
        act()
        os.write(sys.stderr.fileno(), TAKEN.encode())  # not by logging, whose locks the main thread may have

    signal.signal(number, handle)
