"""The connector is the paper's, written out plainly here as the reference."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from hf_ext.uni_med.connector import Connector, Router, resample

VISION, TEXT, EXPERTS, TASKS = 8, 16, 5, 5
KINDS = ["linear", "mlp", "moe_linear", "moe_mlp"]
ROUTERS = ["soft", "hard", "constant", "sparse"]
INPUTS = ["task_token", "token", "task"]
RESAMPLINGS = ["projection", "avg_pool", "max_pool"]


def connector(**options) -> Connector:
    torch.manual_seed(0)
    return Connector(VISION, TEXT, num_experts=EXPERTS, num_tasks=TASKS, **options)


def inputs(images: int = 3, grid: tuple[int, int] = (4, 8)) -> tuple:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(images, grid[0] * grid[1], VISION, generator=generator), grid, torch.tensor([4, 0, 2])[:images]


def formula(model: Connector, features, grid, tasks, kind, router, router_input, how) -> torch.Tensor:
    """One image, one token, one expert at a time."""
    rows = []
    for image, task in zip(features, tasks):
        square = image.T.reshape(1, VISION, *grid)
        if how == "projection":
            tokens = [torch.cat(list(group)) for group in image.split(4)]
        else:
            pooled = F.avg_pool2d(square, 2, 2) if how == "avg_pool" else F.max_pool2d(square, 2, 2)
            tokens = pooled[0].flatten(1).T
        rows.append(torch.stack([projected(model, token, task, kind, router, router_input) for token in tokens]))
    return torch.stack(rows)


def projected(model, x, task, kind, router, router_input):
    def expert(e: int):
        experts = model.experts
        if kind.endswith("linear"):
            return experts.down[e].T @ x + experts.down_bias[e]
        return experts.down[e].T @ F.gelu(experts.up[e] @ x + experts.up_bias[e]) + experts.down_bias[e]

    if not kind.startswith("moe"):
        return expert(0)
    if router == "hard":
        return expert(int(task))
    if router == "constant":
        return sum(expert(e) for e in range(EXPERTS)) / EXPERTS
    r = model.router
    if router_input == "task_token":
        first, mixed = torch.cat([r.task_weight, r.token_weight], 1), torch.cat([model.task_tokens[task], x])
    elif router_input == "token":
        first, mixed = r.token_weight, x
    else:
        first, mixed = r.task_weight, model.task_tokens[task]
    logits = r.out_weight @ F.gelu(first @ mixed + r.bias) + r.out_bias
    if router == "soft":
        weights = logits.sigmoid() / logits.sigmoid().sum()
        return sum(weights[e] * expert(e) for e in range(EXPERTS))
    top = logits.topk(2).indices.tolist()
    total = sum(math.e ** logits[e] for e in top)
    return sum(math.e ** logits[e] / total * expert(e) for e in top)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_that_of_the_formula(kind, router):
    features, grid, tasks = inputs()
    for router_input, how in product(INPUTS, RESAMPLINGS):
        model = connector(kind=kind, router=router, router_input=router_input, resampling=how)
        out, weights = model(features, grid, tasks)
        expected = formula(model, features, grid, tasks, kind, router, router_input, how)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert (weights is None) == (not kind.startswith("moe"))
        if weights is not None:
            assert weights.shape == (3, 8, EXPERTS)
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 8))
            assert router != "sparse" or torch.equal((weights > 0).sum(-1), torch.full((3, 8), 2))


@pytest.mark.parametrize("router", ["soft", "sparse"])
@pytest.mark.parametrize("kind", ["moe_linear", "moe_mlp"])
def test_gradients_are_those_of_the_formula(kind, router):
    model = connector(kind=kind, router=router)
    features, grid, tasks = inputs()
    features.requires_grad_()
    parameters = [features, *model.parameters()]
    ours = torch.autograd.grad(model(features, grid, tasks)[0].square().sum(), parameters)
    plain = formula(model, features, grid, tasks, kind, router, "task_token", "projection")
    for name, mine, other in zip(
        ["features", *dict(model.named_parameters())], ours, torch.autograd.grad(plain.square().sum(), parameters)
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def test_sparse_routing_computes_only_the_chosen_experts():
    model = connector(router="sparse", router_input="task")
    features, grid, tasks = inputs()
    _, weights = model(features, grid, tasks)
    unused = [e for e in range(EXPERTS) if not weights[..., e].any()]
    assert unused
    with torch.no_grad():
        for e in unused:
            model.experts.up[e] = model.experts.down[e] = torch.nan
    out, _ = model(features, grid, tasks)
    assert out.isfinite().all()
    out.sum().backward()
    for parameter in (model.experts.up, model.experts.down, model.experts.up_bias, model.experts.down_bias):
        assert not parameter.grad[unused].any()


def test_only_routing_by_task_requires_a_task():
    features, grid, tasks = inputs()
    for options in ({"kind": "mlp"}, {"router": "constant"}, {"router_input": "token"}):
        model = connector(**options)
        assert torch.equal(model(features, grid)[0], model(features, grid, tasks)[0])
        assert model.task_tokens is None
    for options in ({}, {"router_input": "task"}, {"router": "hard"}, {"router": "sparse"}):
        with pytest.raises(ValueError, match="routes by task"):
            connector(**options)(features, grid)


def test_the_start_is_that_of_linear_layers():
    torch.manual_seed(0)
    model = Connector(64, 96, num_experts=2)
    assert abs(model.experts.up).max() <= 256**-0.5 and abs(model.experts.up).max() > 0.99 * 256**-0.5
    assert abs(model.experts.down).max() <= 96**-0.5 and abs(model.experts.down_bias).max() <= 96**-0.5
    assert model.task_tokens.std().item() == pytest.approx(0.02, rel=0.1)
    router = Router(64, 32, 3)
    assert router.bias.shape == (384,) and abs(router.token_weight).max() <= 96**-0.5


def test_a_grid_that_cannot_be_divided_is_an_error():
    with pytest.raises(ValueError, match="15 visual tokens cannot be grouped by resampling_rate=4"):
        resample(torch.zeros(1, 15, 2), (3, 5), "projection", 4)
    with pytest.raises(ValueError, match="3 x 4 visual tokens cannot be pooled by squares of 2 x 2"):
        resample(torch.zeros(1, 12, 2), (3, 4), "avg_pool", 4)


def test_half_precision_is_close_and_does_not_underflow():
    features, grid, tasks = inputs()
    for router in ("soft", "sparse"):
        out, _ = connector(router=router).to(torch.bfloat16)(features.bfloat16(), grid, tasks)
        full, _ = connector(router=router)(features, grid, tasks)
        assert out.dtype == torch.bfloat16 and out.isfinite().all()
        assert router == "sparse" or (out.float() - full).norm() < 0.02 * full.norm()  # other experts may be chosen
    model = connector().half()
    with torch.no_grad():
        model.router.out_bias.fill_(-30)
    out, weights = model(features.half(), grid, tasks)
    assert out.isfinite().all() and weights.float().sum(-1).sub(1).abs().max() < 0.01


def test_the_sparse_router_where_pytorch_has_no_grouped_products():
    features, grid, tasks = inputs()
    model = connector(router="sparse")
    expected, _ = model(features, grid, tasks)
    double = connector(router="sparse").double()
    torch.testing.assert_close(double(features.double(), grid, tasks)[0].float(), expected, rtol=1e-5, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: double(x, grid, tasks[:1])[0], (features[:1].double().requires_grad_(),))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(features, grid, tasks)[0], expected, rtol=1e-5, atol=1e-6)
