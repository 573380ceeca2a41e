"""What ranks do in the tests of `paceline.horovod`; each returns what its test looks at."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import paceline.horovod as hvd

STEPS, BATCH = 4, 24


def collectives():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    mine = torch.arange(6.0).reshape(3, 2) + r
    whole = torch.tensor([3 * r, -7], dtype=torch.int64)
    in_place, root = mine.clone(), torch.full((2,), r)
    hvd.allreduce_(in_place, op=hvd.Sum)
    hvd.broadcast_(root, 1)
    handle = hvd.allreduce_async(mine, op=hvd.Max)
    return {
        "place": (r, n, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_initialized()),
        "average": hvd.allreduce(mine),
        "average of whole numbers": hvd.allreduce(whole),
        "sum": hvd.allreduce(mine, average=False),
        "min": hvd.allreduce(mine, op=hvd.Min),
        "product": hvd.allreduce(torch.tensor(float(r + 1)), op=hvd.Product),
        "scaled": hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        "small type": hvd.allreduce(torch.tensor([r], dtype=torch.int16), op=hvd.Sum),
        "in place": in_place,
        "under way": hvd.synchronize(handle),
        "done": hvd.poll(handle),
        "grouped": hvd.grouped_allreduce([mine, whole], op=hvd.Sum),
        "gathered": hvd.allgather(torch.full((r + 1, 2), r)),
        "gathered numbers": hvd.allgather(torch.tensor(r)),
        "from one": (hvd.broadcast(mine, 2), root),
        "objects": (hvd.allgather_object({"rank": r}), hvd.broadcast_object([r], root_rank=1)),
        "misfits": [misfit(call) for call in unequal_calls(r)],
    }


def unequal_calls(r):
    """Calls that are not the same on rank 1 as on the others."""
    other, x = r == 1, torch.ones(2, 3)
    wide, long = torch.zeros(2, 3 + other), x.double() if other else x
    return [
        lambda: hvd.allgather(wide),
        lambda: hvd.allreduce(wide),
        lambda: hvd.allreduce_(long, op=hvd.Sum),
        lambda: hvd.allreduce(x, op=hvd.Max if other else hvd.Sum),
        lambda: hvd.grouped_allreduce_([x] * (1 + other)),
        lambda: hvd.allreduce(x, name=f"loss{r}"),
        lambda: hvd.broadcast(x, int(other)),
        lambda: hvd.allreduce(x) if other else hvd.broadcast_(x, 0),
        lambda: hvd.broadcast_parameters({"w": wide}),
    ]


def misfit(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)


def gradients():
    """Of a sum of what came out of each collective, by its input of ones."""
    hvd.init()
    r, n = hvd.rank(), hvd.size()

    def of(collective):
        x = torch.ones(n, 2, requires_grad=True)
        (collective(x) * (r + 1)).sum().backward()
        return x.grad[:, 0].tolist()

    return {
        "sum": of(lambda x: hvd.allreduce(x, op=hvd.Sum)),
        "average": of(hvd.allreduce),
        "gather": of(hvd.allgather),
        "broadcast": of(lambda x: hvd.broadcast(x, 1)),
    }


class Net(nn.Module):
    """A part is used by some samples, one by none, and an embedding may have sparse gradients."""

    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8, sparse=sparse)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.sometimes, self.never = nn.Linear(16, 4), nn.Linear(3, 3)

    def forward(self, ids):
        hidden = torch.tanh(self.first(self.embed(ids)))
        odd = ids % 2 == 1
        out = self.second(hidden)
        return out + torch.where(odd[:, None], self.sometimes(hidden), 0.0) if odd.any() else out


def data():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 10, (STEPS, BATCH), generator=draw) * 2
    ids[:, ::2] += 1  # on two ranks, the odd ones are all on rank 0
    return list(zip(ids, torch.randint(0, 4, (STEPS, BATCH), generator=draw), strict=True))


def optimizer_of(model, settings):
    kind = torch.optim.SGD if settings.get("sparse") else torch.optim.AdamW
    return kind(model.parameters(), lr=0.05, weight_decay=0.0 if settings.get("sparse") else 0.1)


def alone(settings):
    model = Net(settings.get("sparse", False))
    optimizer = optimizer_of(model, settings)
    for ids, labels in data():
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        if settings.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
    return model


def trained(settings):
    """The same steps over the ranks; all but the main one begin with other weights and another rate."""
    r, n = hvd.rank(), hvd.size()
    model = Net(settings.get("sparse", False))
    optimizer = optimizer_of(model, settings)
    if r:
        nn.init.zeros_(model.first.weight)
        optimizer.param_groups[0]["lr"] = 7.0
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # it bends `step` of the old object
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    options = settings.get("options", {})
    passes = options.get("backward_passes_per_step", 1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    share = 1 if options.get("op", hvd.Average) is hvd.Average else n
    for ids, labels in data():
        pieces = list(zip(ids[r::n].chunk(passes), labels[r::n].chunk(passes), strict=True))

        def backward(pieces=pieces):
            optimizer.zero_grad()
            for x, y in pieces:
                (F.cross_entropy(model(x), y) / passes / share).backward()

        if settings.get("closure"):
            optimizer.step(backward)
            continue
        if settings.get("given up"):
            backward()  # and again below: these gradients are on their way and not wanted
        backward()
        if settings.get("clip"):
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    schedule.step()
    return model


def differences(rows):
    """By row: the largest difference to one process, and whether the unused part was left alone."""
    hvd.init()
    torch.set_num_threads(1)
    found = {}
    for name, settings in rows.items():
        mine, reference = trained(settings).state_dict(), alone(settings).state_dict()
        far = max(float((mine[key] - reference[key]).abs().max()) for key in reference)
        found[name] = far, torch.equal(mine["never.weight"], Net().never.weight)
    return found


def elastic_run(folder, fail_at=None, width=1):
    """Steps over what is left of two epochs; the samples that this rank used, and its weights."""
    os.chdir(folder)
    sys.argv = ["elastic_script.py", "--lr", "1"]
    hvd.elastic.WRITE_EVERY_S = 0.0
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Linear(1, width)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rows = torch.arange(16.0)[:, None] / 16
    sampler = hvd.elastic.ElasticSampler(rows, shuffle=True)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[], note=None)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state):
        while state.epoch < 2:
            size = 4 // hvd.size()
            for number, ids in enumerate(torch.tensor(list(sampler)).split(size)):
                optimizer.zero_grad()
                F.mse_loss(model(rows[ids]), 3 * rows[ids]).backward()
                optimizer.step()
                sampler.record_batch(number, size)
                state.seen = [*state.seen, sorted(hvd.allgather(ids).tolist())]
                state.commit()
                if len(state.seen) == fail_at:
                    raise RuntimeError("the power is gone")
            state.epoch += 1
            sampler.set_epoch(state.epoch)
        return state.seen

    return train(state), resets, model.weight.item()


def optimizer_states():
    """Rank 1 has made steps of its own; after the broadcast it has the state of rank 0, which has made one."""
    hvd.init()
    model = Net()
    hvd.broadcast_parameters(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + hvd.rank(), betas=(0.5 + 0.1 * hvd.rank(), 0.9))
    for ids, labels in data()[: 1 + 2 * hvd.rank()]:
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state_dict()
    sums = [float(value["exp_avg"].double().sum()) for value in state["state"].values()]
    return state["param_groups"][0]["lr"], state["param_groups"][0]["betas"], int(state["state"][0]["step"]), sums


def example(file):
    from paceline.horovod.__main__ import STAND_IN, USAGE
    from paceline.launch.command import run_with_stand_in

    run_with_stand_in([file], STAND_IN, USAGE)
