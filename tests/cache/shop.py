"""A world with one client and a record of what was decided, for tests of a few steps."""

from __future__ import annotations

from kvstore.cache.core import Cache
from kvstore.cache.messages import Acquire, Decision, EndReason, Granted, Release, StartVerify, Tier, TransferResult
from kvstore.cache.slots import SlotState
from tests.cache.world import Client, Path, World, chain, pack, sizes

PATH = (0, 1, 0)
OK, FAILED = TransferResult.OK, TransferResult.FAILED


class Shop(World):
    """A world with one client, and a list of all decisions."""

    def __init__(self, verify: str = "read", **changes: object) -> None:
        super().__init__(Cache(sizes(verify=verify, **changes)))
        self.seen: list[Decision] = []
        self.attach(0, 0, 0)

    @property
    def client(self) -> Client:
        return self.clients[1]

    def _carry_out(self, decision: Decision) -> None:
        self.seen.append(decision)
        super()._carry_out(decision)

    def put(self, path: Path = PATH, namespace: int = 1, lease: int = 1) -> None:
        self.reserve(self.client, namespace, [], len(path))
        self.commit(self.client, list(self.client.reserved), path, lease)
        self.step()

    def let_go(self, lease: int) -> None:
        self.release(self.client, lease, 0, self.cache.release(Release(1, lease)))
        self.step()

    def get(self, lease: int, path: Path = PATH, group: str = "") -> None:
        members = (1, 3) if group else (1,)
        request = Acquire(1, lease, pack(chain(path)), self.now + 1.0, 0 if group else 1, group)
        self.acquired(self.client, lease, members, chain(path), self.cache.acquire(request, self.now))
        self.step()

    def sum_all(self) -> None:
        for verify in self.cache.next_sums(1 << 20):
            self.pending[verify.transfer] = verify
        self.finish_all()

    def scrub(self) -> list[StartVerify]:
        found = self.cache.next_scrubs(1 << 20)
        self.pending.update((each.transfer, each) for each in found)
        return found

    def finish_all(self, result: TransferResult = OK) -> None:
        self.step()
        for transfer in list(self.pending):
            self.finish(transfer, result)
        self.step()

    def write_all(self) -> None:
        for write in self.cache.next_writes(100):
            self.pending[write.transfer] = write
        self.finish_all()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cache.tick(self.now)
        self.step()

    def spoil(self, units: int) -> None:
        self.dram[units] = "wrong"
        self.spoiled.add(units)

    def grants(self, lease: int) -> tuple[int, EndReason | None]:
        """Blocks granted under a lease, and why no more will come."""
        mine = [each for each in self.seen if isinstance(each, Granted) and each.lease == lease]
        return sum(each.units.shape[1] for each in mine), mine[-1].ended if mine else None

    def verifies(self) -> list[StartVerify]:
        return [each for each in self.pending.values() if isinstance(each, StartVerify)]

    def states(self, tier: Tier = Tier.DRAM) -> set[str]:
        """What the slots of a tier are, apart from free."""
        table = self.cache.state.tables[tier]
        return {state.name.lower() for state in SlotState if table.bytes_in[state]} - {"unassigned", "free"}

    def slot_of(self, key: bytes) -> int:
        """The dram slot of a block."""
        index = self.cache.state.index
        return index.slot_at[Tier.DRAM][index.find_one(1, key)]

    def counter(self, name: str) -> int:
        return self.cache.stats().counters.get(name, 0)


def stored(verify: str = "transfer", path: Path = PATH) -> Shop:
    """Blocks in both tiers, held by nobody."""
    shop = Shop(verify, scrub_rest_s=50.0)
    shop.put(path)
    shop.write_all()
    shop.let_go(1)
    return shop
