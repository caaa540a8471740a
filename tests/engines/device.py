"""The connector as beside a GPU, without one: a driver for tests copies. Named in kv_connector_module_path by tests."""

from typing import Any

from kvstore.clients.vllm import KVStoreConnector
from kvstore.clients.vllm_device import DevicePages, Gpu
from kvstore.testing.fake_cuda import FakeCuda


class DeviceConnector(KVStoreConnector):
    """See the module's text."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        gpu = Gpu(FakeCuda(), 0)
        self._pages_of = lambda tensors: DevicePages(tensors, gpu)
