"""The arithmetic of a merge: by hand, against the formula in float64, and against itself."""

import math

import numpy as np
import pytest
import reference_election as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import TORCH_DTYPES

from hf_ext import _native
from hf_ext.emr import election
from hf_ext.storage.native import FLOATS
from hf_ext.storage.safetensors_file import torch_dtype

TYPES = [name for name in TORCH_DTYPES if name in FLOATS]


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def elect(dtype: str, base: torch.Tensor, tasks: list[torch.Tensor], threads: int = 1):
    """Elected weights, masks as booleans, sums."""
    elected = torch.empty_like(base)
    masks, sums = election.elect(dtype, raw(base), [raw(task) for task in tasks], raw(elected), threads)
    bits = [np.unpackbits(mask, count=base.numel(), bitorder="little").astype(bool) for mask in masks]
    return elected, bits, masks, sums


def modulate(dtype: str, base: torch.Tensor, elected: torch.Tensor, mask, scale: float, threads: int = 1) -> torch.Tensor:
    out = torch.empty_like(base)
    election.modulate(dtype, raw(base), raw(elected), mask, scale, raw(out), threads)
    return out


def fine_tunes(dtype: str, count: int, values: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base and fine-tunes of it, of which each left about a third alone."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(values, generator=generator, dtype=torch.float64)
    moves = [torch.randn(values, generator=generator, dtype=torch.float64) * 0.05 for _ in range(count)]
    kept = [torch.rand(values, generator=generator) < 2 / 3 for _ in range(count)]
    return base.to(torch_dtype(dtype)), [(base + move * keep).to(torch_dtype(dtype)) for move, keep in zip(moves, kept)]


def test_four_parameters_by_hand():
    base = torch.tensor([1.0, 1.0, 1.0, 1.0])
    #            sum        +0.5       -1.0       0 (minus)  +0.5
    first = torch.tensor([1.75, 0.50, 1.25, 1.25])
    second = torch.tensor([0.75, 1.50, 0.75, 1.25])
    third = torch.tensor([1.00, 0.00, 1.00, 1.00])
    elected, bits, _, sums = elect("F32", base, [first, second, third])
    assert elected.tolist() == [1.75, 0.0, 0.75, 1.25]
    assert [mask.tolist() for mask in bits] == [
        [True, True, False, True],
        [False, False, True, True],
        [False, True, False, False],
    ]
    assert [float(election.rescaler(s)) for s in sums] == [1.75 / 2.0, 1.25 / 0.5, 1.0]
    assert sums["moved"].tolist() == [4, 4, 1] and sums["agreeing"].tolist() == [3, 2, 1]
    assert sums["product"].tolist() == [0.75 * 0.75 + 0.5 * 1.0 + 0.25**2, 0.25**2 + 0.25**2, 1.0]
    assert (sums["base_squares"] == 4).all() and (sums["not_finite"] == 0).all()


def assert_sums(sums: np.ndarray, base: np.ndarray, task: np.ndarray, mask: np.ndarray, elected: np.ndarray) -> None:
    """The sums of a task are those of its change and of the elected one, in float64."""
    vector, unified = task - base, mask * (elected - base)
    for field, value in {
        "moved": np.count_nonzero(vector), "agreeing": mask.sum(), "not_finite": 0, "base_squares": (base**2).sum(),
        "task_l1": np.abs(vector).sum(), "unified_l1": np.abs(unified).sum(), "task_squares": (vector**2).sum(),
        "unified_squares": (unified**2).sum(), "product": (vector * unified).sum(),
    }.items():  # fmt: skip
        assert math.isclose(sums[field], value, rel_tol=1e-12), field


@pytest.mark.parametrize("count", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_election_is_the_formula_in_float64(dtype, count):
    base, tasks = fine_tunes(dtype, count, 5003)
    elected, bits, _, sums = elect(dtype, base, tasks)
    wide, wides = base.double().numpy(), [task.double().numpy() for task in tasks]
    expected, masks = reference.elect(wide, wides)
    assert (elected.double().numpy() == expected).all()
    for task, mask, expected_mask, total in zip(wides, bits, masks, sums):
        assert (mask == expected_mask).all()
        assert math.isclose(election.rescaler(total), reference.rescaler(wide, task, expected, mask), rel_tol=1e-12)
        assert_sums(total, wide, task, mask, expected)


@pytest.mark.parametrize("scale", [1.0, 0.7310585786300049, 1.9])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_task_is_the_formula_rounded_once_for_every_operation(dtype, scale):
    base, tasks = fine_tunes(dtype, 3, 5003)
    elected, bits, masks, _ = elect(dtype, base, tasks)
    kind = torch.float64 if dtype == "F64" else torch.float32
    for mask, packed in [*zip(bits, masks), (np.zeros(5003, bool), None)]:
        moved = elected if scale == 1 else (base.to(kind) + scale * (elected.to(kind) - base.to(kind))).to(base.dtype)
        expected = torch.where(torch.from_numpy(mask), moved, base)
        assert torch.equal(raw_bits(modulate(dtype, base, elected, packed, scale)), raw_bits(expected))


def raw_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_half_rounds_as_torch_rounds_it(dtype):
    """A base of 0 and an elected weight of every finite value: the product with the scale is all there is to round."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch_dtype(dtype))
    every = every[torch.isfinite(every.float())]
    base, mask = torch.zeros_like(every), np.full((every.numel() + 7) // 8, 255, np.uint8)
    for scale in (0.5, 0.3, 1.0001, 3.0, 65504.0):
        expected = (every.float() * torch.tensor(scale, dtype=torch.float32)).to(every.dtype)
        # The sum with 0 makes +0 of -0.
        expected = (expected.float() + 0.0).to(every.dtype)
        modulated = modulate(dtype, base, every, mask, scale)
        assert torch.equal((modulated.float() + 0.0).to(every.dtype).view(torch.int16), expected.view(torch.int16)), scale


@pytest.mark.parametrize("values", [0, 1, 7, 8, 9, 511, 512, 513, 65535, 65536, 65537, 200_001])
def test_lengths_and_threads_do_not_matter(values):
    base, tasks = fine_tunes("F32", 3, values)
    expected, masks = reference.elect(base.numpy(), [task.numpy() for task in tasks])
    once, results = None, []
    for threads in (1, 2, 5):
        elected, bits, packed, sums = elect("F32", base, tasks, threads)
        assert (elected.numpy() == expected).all() and all((a == b).all() for a, b in zip(bits, masks))
        once = sums if once is None else once
        assert (sums == once).all()
        results.append(modulate("F32", base, elected, packed[0], 0.8, threads))
    assert all(torch.equal(result, results[0]) for result in results)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_finite_weights_follow_the_formula(data):
    values = data.draw(st.integers(1, 40))
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    base, *tasks = (
        torch.tensor(data.draw(st.lists(numbers, min_size=values, max_size=values)), dtype=torch.float32) for _ in range(4)
    )
    elected, bits, _, _ = elect("F32", base, tasks)
    expected, masks = reference.elect(base.numpy(), [task.numpy() for task in tasks])
    assert (elected.numpy() == expected).all() and all((a == b).all() for a, b in zip(bits, masks))


@pytest.mark.parametrize("dtype", TYPES)
def test_values_that_are_not_finite_are_counted(dtype):
    base, tasks = fine_tunes(dtype, 2, 100)
    base[3] = base[4] = torch.inf
    for task in tasks:
        task[3], task[4] = torch.inf, -torch.inf
    tasks[0][50] = torch.nan
    elected, bits, _, sums = elect(dtype, base, tasks)
    assert sums["not_finite"].tolist() == [2, 1]
    assert elected[3] == torch.inf and not any(mask[3] for mask in bits)


def target(dtype: str, base, elected, old, new, live) -> election.Target:
    return election.Target(FLOATS[dtype], raw(base), raw(elected), *old, *new, raw(live))


@pytest.mark.parametrize("dtype", TYPES)
def test_retarget_turns_one_task_into_the_other(dtype):
    base, tasks = fine_tunes(dtype, 3, 150_001)
    elected, _, masks, sums = elect(dtype, base, tasks)
    modulators = [(None, 0.3), *((mask, election.rescaler(total)) for mask, total in zip(masks, sums))]
    models = [modulate(dtype, base, elected, *modulator) for modulator in modulators]
    for i, old in enumerate(modulators):
        for j, new in enumerate(modulators):
            live = models[i].clone()
            assert election.retarget([target(dtype, base, elected, old, new, live)], threads=2) is None
            assert torch.equal(live, models[j])


@pytest.mark.parametrize("changed", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 600, 70_000, 150_000])
def test_retarget_changes_nothing_if_one_weight_differs(place, changed):
    targets, lives = [], []
    for seed, dtype in enumerate(("F32", "BF16", "F32")):
        base, tasks = fine_tunes(dtype, 2, 150_001, seed)
        elected, _, masks, sums = elect(dtype, base, tasks)
        old, new = ((mask, election.rescaler(total)) for mask, total in zip(masks, sums))
        lives.append(modulate(dtype, base, elected, *old))
        targets.append(target(dtype, base, elected, old, new, lives[-1]))
    lives[changed][place] += 1
    before = [live.clone() for live in lives]
    assert election.retarget(targets, threads=3) == changed
    assert all(torch.equal(live, copy) for live, copy in zip(lives, before))


def test_weights_that_neither_task_moved_are_checked_too():
    base = torch.zeros(5000)
    live = base.clone()
    live[4999] = -0.0
    assert election.retarget([target("F32", base, base, (None, 0.5), (None, 0.5), live)]) == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_adopting_a_task_keeps_what_is_elected(dtype):
    base, (first, second, third) = fine_tunes(dtype, 3, 4001)
    elected, _, _, _ = elect(dtype, base, [first, second])
    before = elected.clone()
    (mask,), (sums,) = election.adopt(dtype, raw(base), raw(elected), raw(third))
    bits = torch.from_numpy(np.unpackbits(mask, count=4001, bitorder="little").astype(bool))
    free = before == base
    assert torch.equal(elected[~free], before[~free]) and torch.equal(elected[free], third[free])
    wide, task, whole = (tensor.double().numpy() for tensor in (base, third, elected))
    assert np.array_equal(bits, (task - wide) * (whole - wide) > 0)
    assert_sums(sums, wide, task, bits.numpy(), whole)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: _native.elect(1, a, (a, b), bytearray(8), bytearray(2), bytearray(144), 1),
        lambda a, b: _native.elect(1, a, (), bytearray(8), bytearray(0), bytearray(0), 1),
        lambda a, b: _native.elect(1, a, (a,), bytearray(8), bytearray(2), bytearray(72), 1),
        lambda a, b: _native.elect(1, a, (a,), bytearray(8), bytearray(1), bytearray(71), 1),
        lambda a, b: _native.elect(9, a, (a,), bytearray(8), bytearray(1), bytearray(72), 1),
        lambda a, b: _native.elect(1, a, [a], bytearray(8), bytearray(1), bytearray(72), 1),
        lambda a, b: _native.modulate(1, a, b, None, 1.0, bytearray(8)),
        lambda a, b: _native.modulate(1, a, a, b"", 1.0, bytearray(8)),
        lambda a, b: _native.retarget(((1, a, a, None, 1.0, b"ab", 1.0, bytearray(8)),)),
        lambda a, b: _native.retarget(((1, a, a, None, 1.0, None, 1.0, bytearray(9)),)),
        lambda a, b: _native.retarget(((1, a, b, None, 1.0, None, 1.0, bytearray(8)),)),
        lambda a, b: _native.retarget((a, b)),
        lambda a, b: _native.retarget([]),
    ],
)  # fmt: skip
def test_buffers_of_the_wrong_size_are_refused(call):
    with pytest.raises(TypeError):
        call(bytes(8), bytes(12))


def test_read_only_buffers_are_not_written():
    with pytest.raises((TypeError, BufferError)):
        _native.modulate(1, bytes(8), bytes(8), None, 1.0, bytes(8))


@pytest.mark.parametrize("dtype", TYPES)
def test_all_instruction_sets_make_the_same(dtype):
    generator = torch.Generator().manual_seed(5)
    base, tasks = fine_tunes(dtype, 3, 40_003)
    small = torch.tensor([0.0, -0.0, 1e-7, -6e-8, 3e-5, 1e-40, -2e-320], dtype=torch.float64).to(base.dtype)
    strange = torch.tensor([math.inf, -math.inf, math.nan], dtype=base.dtype)
    for tensor in (base, *tasks):
        places = torch.randint(40_003, (500,), generator=generator)
        tensor[places] = small[torch.randint(len(small), (500,), generator=generator)]
        tensor[::997] = strange[torch.arange(0, 40_003, 997) % 3]  # in the base and in all tasks; a merge refuses others
    results = []
    for instructions in _native.instruction_sets():
        before = _native.use(instructions)
        try:
            elected, _, masks, sums = elect(dtype, base, tasks)
            live = modulate(dtype, base, elected, masks[0], 0.8)
            first = raw(live).tobytes()
            switch = (FLOATS[dtype], raw(base), raw(elected), masks[0], 0.8, masks[1], 1.3, raw(live))
            assert _native.retarget((switch,)) == 1
            assert raw(live).tobytes() == raw(modulate(dtype, base, elected, masks[1], 1.3)).tobytes()
        finally:
            _native.use(before)
        results.append((raw(elected).tobytes(), masks.tobytes(), sums.tobytes(), first, raw(live).tobytes()))
    assert len(set(results)) == 1
