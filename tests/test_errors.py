"""The error tree: every fault travels as a gRPC status and comes back as itself."""

import grpc
import pytest

from kvstore import errors


def _tree(root: type[errors.KVStoreError]) -> list[type[errors.KVStoreError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


KINDS = [kind for kind in _tree(errors.KVStoreError) if kind.__module__ == "kvstore.errors"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_the_wire(kind: type[errors.KVStoreError]) -> None:
    back = errors.from_code(kind.code, errors.to_text(kind("dram: full; wait")))
    assert type(back) is kind
    assert str(back) == "dram: full; wait"


@pytest.mark.parametrize("quoted", ["x" * 100_000, "🗝" * 10_000, "\0" * 5_000])
def test_a_text_of_any_length_fits_into_a_status(quoted: str) -> None:
    text = errors.to_text(errors.NotFound(f"no block {quoted}; try another"))
    assert len(text.encode()) <= 2_010
    assert text.startswith("NotFound: no block ")
    assert text.endswith("; try another")


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_a_grpc_status_name(kind: type[errors.KVStoreError]) -> None:
    assert kind.code in grpc.StatusCode.__members__


def test_a_foreign_status_keeps_its_meaning_and_text() -> None:
    back = errors.from_code("UNAVAILABLE", "failed to connect: no socket")
    assert type(back) is errors.Unavailable
    assert str(back) == "failed to connect: no socket"


def test_a_class_name_under_another_status_is_only_text() -> None:
    assert type(errors.from_code("NOT_FOUND", "Corruption: of the name")) is errors.NotFound


def test_an_unknown_status_is_the_root_error() -> None:
    assert type(errors.from_code("TEAPOT", "short and stout")) is errors.KVStoreError


def test_only_faults_of_the_environment_are_retryable() -> None:
    assert {kind for kind in KINDS if kind.retryable} == {errors.ResourceExhausted, errors.Unavailable, errors.DeadlineExceeded}
