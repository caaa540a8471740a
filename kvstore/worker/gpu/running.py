"""One pass of the model on a GPU: replayed from a graph where all its tokens decode, else queued layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvstore.worker.attention import Step
from kvstore.worker.gpu.device import Gpu
from kvstore.worker.gpu.graphs import DecodeGraphs, Model
from kvstore.worker.rows import ArenaRows, RowLayout


class GpuRunner:
    """Runs steps over one cache. `graphs` says how many were recorded and replayed."""

    def __init__(self, gpu: Gpu, layout: RowLayout) -> None:
        self.graphs = DecodeGraphs(gpu, layout)
        self._gpu = gpu

    def logits(
        self, model: Model, step: Step, tokens: Sequence[int], positions: Sequence[int], known: Sequence[int], mapped: ArenaRows
    ) -> Tensor:
        """Logits [known, vocab] in the host's memory, of the step's places `known`. All that it wrote is in its slots then."""
        if step.arrive is None and len(known) == len(tokens) == len(step.spans):
            found = self.graphs.run(model, step.spans, tokens, positions, mapped)
            if found is not None:
                return self._gpu.bring(found)
        ids = self._gpu.upload(np.array([[tokens], [positions]], np.int64))
        return self._gpu.bring(model(ids[0], ids[1], self._gpu.upload(np.array(known, np.int64)), step))

    def close(self) -> None:
        """Let the graphs go."""
        self.graphs.drop()
