"""What is offered where models do not fit: it is enough, less of it is not, and nothing that would do is left out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_parts import config_of, model, variant

from engine.config import Config, ModelSpec
from engine.placement.hardware import GIB, Gpu, Hardware, imagined
from engine.placement.needs import Footprints
from engine.placement.plan import DEMO_OF_TASK, _Planner, plan
from engine.placement.report import GPU_SIZES_GIB
from engine.placement.types import Plan, Refusal

_IN_GENERAL = "smaller variants, or fewer models, in models.yaml"
_OF_VARIANTS = {"add a variant for this device in models.yaml", "a GPU, or a variant that `runs_on: any`"}
_OFFERS = {
    "free": r"take the line(s?) `keep_loaded: true` of ([\w, ]+) out of models.yaml, so that models take turns",
    "context": r"context_length: (\d+) in place of (\d+)(?: for (\w+))?",
    "share": r"gpu_memory_utilization: ([\d.]+) for (\w+)",
    "end": r"end the other processes there, which hold ([\d.]+) GiB",
    "ram": r"([\d.]+) GiB more RAM",
    "gpus": r"(?:a GPU|(\d+) GPUs) of (\d+) GiB",
    "demo": r"give (\w+) a `demo` in models.yaml",
    "without": r"take (\w+) out of models.yaml",
}
_STEP, _SHORTEST = 1024, 2048
_PLANNER = _Planner(Footprints(), {}, None)


@dataclass(frozen=True)
class Case:
    """Chat models and a machine, and changes of them."""

    config: Config
    machine: Hardware

    def planned(self) -> Plan | Refusal:
        return plan(self.config, self.machine)

    def fits(self) -> bool:
        """Whether there is a plan; without looking for changes, which is most of the work where there is none."""
        return not isinstance(_PLANNER.fit(self.config, self.machine), Refusal)

    def model(self, name: str) -> ModelSpec:
        return self.config.models[name]

    def on(self, **changed: Any) -> "Case":
        return replace(self, machine=replace(self.machine, **changed))

    def only(self, *specs: ModelSpec) -> "Case":
        models = MappingProxyType({spec.id: spec for spec in specs})
        return replace(self, config=replace(self.config, models=models))

    def put(self, name: str, **values: Any) -> "Case":
        changed = self.model(name).model_copy(update=values)
        return self.only(*(changed if spec.id == name else spec for spec in self.config.models.values()))

    def without(self, name: str) -> "Case":
        return self.only(*(spec for spec in self.config.models.values() if spec.id != name))

    def free(self, *names: str) -> "Case":
        for name in names:
            self = self.put(name, keep_loaded=False)  # noqa: PLW0642  # one change after the other
        return self

    def with_demo(self, name: str) -> "Case":
        return self.put(name, demo=DEMO_OF_TASK[self.model(name).task])

    def with_engine(self, name: str, **values: Any) -> "Case":
        return self.put(name, engine=self.model(name).engine.model_copy(update=values))

    def ended(self, *, on_gpus: bool) -> "Case":
        if on_gpus:
            return self.on(gpus=tuple(replace(gpu, free_bytes=gpu.total_bytes) for gpu in self.machine.gpus))
        return self.on(ram_available_bytes=self.machine.ram_bytes - self.machine.ram_ours_bytes)

    def with_ram(self, tenths: int) -> "Case":
        more, machine = int(tenths / 10 * GIB), self.machine
        if machine.ram_for_models_bytes is not None:
            return self.on(ram_for_models_bytes=machine.ram_for_models_bytes + more)
        return self.on(ram_bytes=machine.ram_bytes + more, ram_available_bytes=machine.ram_available_bytes + more)

    def with_gpus(self, count: int, size_gib: int) -> "Case":
        """With so many of the largest GPUs in that size; what others hold of them stays."""
        gpus = sorted(self.machine.gpus, key=lambda gpu: (-gpu.total_bytes, gpu.index))
        size = size_gib * GIB
        larger = (replace(gpu, total_bytes=size, free_bytes=size - gpu.foreign_bytes) for gpu in gpus[:count])
        return self.on(gpus=(*larger, *gpus[count:]))

    def context(self, name: str) -> int:
        spec = self.model(name)
        return spec.engine.context_length or max(one.context_length or 8192 for one in spec.variants)

    def larger_sizes(self) -> list[int]:
        most = max((gpu.total_bytes for gpu in self.machine.gpus), default=GIB**2)
        return [size for size in GPU_SIZES_GIB if size * GIB >= most]


def read(offer: str) -> tuple[str, re.Match[str]]:
    """Return the kind of an offer, and what it says."""
    return next((kind, found) for kind, pattern in _OFFERS.items() if (found := re.fullmatch(pattern, offer)))


def made(case: Case, lack: Refusal, offer: str) -> tuple[Case, list[Case]]:  # noqa: PLR0911  # each its own
    """Return the case with what is offered, and cases with a little less of it."""
    kind, said = read(offer)
    if kind == "free":
        names = said[2].split(", ")
        assert (said[1] == "s") == (len(names) > 1)
        return case.free(*names), [case.free(*(other for other in names if other != name)) for name in names]
    if kind == "context":
        name, length, before = said[3] or lack.models[0], int(said[1]), int(said[2])
        assert (said[3] is None, before) == (len(lack.models) == 1, case.context(name))
        less = [case.with_engine(name, context_length=more) for more in range(length + _STEP, before, _STEP)[:1]]
        less += [case.with_engine(one, context_length=_SHORTEST) for one in lack.models if case.context(one) > before]
        return case.with_engine(name, context_length=length), less
    if kind == "share":
        had, offered = case.model(said[2]).engine.gpu_memory_utilization, float(said[1])
        hundredths = (percent / 100 for percent in range(5, 96))
        nearer = [share for share in hundredths if abs(share - had) < abs(offered - had) - 0.001]
        shares = offered, *nearer
        enough, *less = (case.with_engine(said[2], gpu_memory_utilization=share) for share in shares)
        return enough, less
    if kind == "end":
        ram = case.machine.ram_bytes - case.machine.ram_available_bytes - case.machine.ram_ours_bytes
        held = sum(gpu.foreign_bytes for gpu in case.machine.gpus) if lack.on_gpus else ram
        assert said[1] == f"{held / GIB:.1f}"
        return case.ended(on_gpus=lack.on_gpus), []
    if kind == "ram":
        tenths = round(float(said[1]) * 10)
        return case.with_ram(tenths), [case.with_ram(tenths - 1)]
    if kind == "gpus":
        count, size = int(said[1] or 1), int(said[2])
        assert count == lack.split
        return case.with_gpus(count, size), [case.with_gpus(count, less) for less in case.larger_sizes() if less < size]
    return (case.with_demo if kind == "demo" else case.without)(said[1]), []


def would_do(case: Case, lack: Refusal) -> Iterator[dict[str, bool]]:
    """Yield which offers there must be, unless there are others before them."""
    names, models = lack.models, case.config.models
    kept = [spec.id for spec in models.values() if spec.keep_loaded]
    yield {"free": bool(kept) and case.free(*kept).fits()}
    long = [name for name in names if case.context(name) > _SHORTEST]
    shared = [name for name in names if "gpu_memory_utilization" in models[name].engine.model_fields_set]
    yield {
        "context": any(case.with_engine(name, context_length=_SHORTEST).fits() for name in long),
        "share": any(
            case.with_engine(name, gpu_memory_utilization=percent / 100).fits()
            for name in shared
            for percent in range(5, 96)
        ),
        "end": (lack.on_gpus or case.machine.ram_for_models_bytes is None) and case.ended(on_gpus=lack.on_gpus).fits(),
    }
    yield {
        "ram": not lack.on_gpus and case.with_ram(9999).fits(),
        "gpus": lack.on_gpus and any(case.with_gpus(lack.split, size).fits() for size in case.larger_sizes()),
    }
    yield {
        "demo": any(case.with_demo(name).fits() for name in names if models[name].demo is None),
        "without": len(models) > 1 and any(case.without(name).fits() for name in names),
    }


_variants = st.builds(
    lambda size, kv, context, splits, runs_on: variant(
        f"v{size}",
        size,
        kv_kib_per_token=kv,
        context_length=context,
        tensor_parallel_sizes=splits,
        runs_on=runs_on,
        activations_gib=0.5,
    ),
    st.integers(1, 16),
    st.sampled_from([0, 256, 256]),
    st.sampled_from([None, 65536, 65536]),
    st.sampled_from([[1], [1, 2], [2]]),
    st.sampled_from(["gpu", "any", "any", "any"]),
)
_engines = st.fixed_dictionaries(
    {},
    optional={
        "gpu_memory_utilization": st.sampled_from([0.05, 0.2, 0.4, 0.95]),
        "context_length": st.sampled_from([2048, 30000]),
    },
)
_chats = st.fixed_dictionaries(
    {
        "variants": st.lists(_variants, min_size=1, max_size=2, unique_by=lambda one: one["folder"]),
        "engine": _engines,
        "keep_loaded": st.booleans(),
        "demo": st.sampled_from([None, None, None, "chat"]),
    }
)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    chats = draw(st.lists(_chats, min_size=1, max_size=3))
    specs = [model(name, *one.pop("variants"), **one) for name, one in zip("abc", chats, strict=False)]
    sizes = draw(st.lists(st.tuples(st.sampled_from([8, 16, 24]), st.sampled_from([1, 1, 0.3])), max_size=2))
    machine = imagined("cpu", ram_gib=draw(st.sampled_from([8, 16, 32])))
    ours = int(machine.ram_bytes * draw(st.sampled_from([0, 0, 0.3])))
    machine = replace(
        machine,
        gpus=tuple(Gpu(at, "GPU", size * GIB, int(size * free * GIB)) for at, (size, free) in enumerate(sizes)),
        ram_available_bytes=int((machine.ram_bytes - ours) * draw(st.sampled_from([1, 1, 0.2]))),
        ram_ours_bytes=ours,
        ram_for_models_bytes=draw(st.sampled_from([None, None, None, GIB])),
    )
    return Case(config_of(*specs), machine)


@settings(max_examples=100)
@given(_cases())
def test_what_is_offered_is_enough_and_less_is_not_and_nothing_that_would_do_is_left_out(case: Case):
    lack = case.planned()
    if isinstance(lack, Plan) or lack.change in _OF_VARIANTS:
        return
    offers = [] if lack.change == _IN_GENERAL else lack.change.split(", or ")
    for offer in offers:
        enough, less = made(case, lack, offer)
        assert enough.fits(), offer
        assert not any(one.fits() for one in less), offer
    expected = ([kind for kind, would in kinds.items() if would] for kinds in would_do(case, lack))
    assert [read(offer)[0] for offer in offers] == next(filter(None, expected), [])


def kept_with(case: Case, chosen: dict[str, str]) -> Case:
    """With these variants alone, all of which have to stay loaded."""
    for name, folder in chosen.items():
        variants = [one for one in case.model(name).variants if one.id == folder]
        case = case.put(name, variants=variants, keep_loaded=True, demo=None)
    return case


@settings(max_examples=100)
@given(_cases())
def test_no_model_takes_turns_without_need_and_none_is_smaller_than_it_has_to_be(case: Case):
    for name in case.config.models:
        case = case.put(name, demo=None, keep_loaded=False)
    found = case.planned()
    if isinstance(found, Refusal):
        return
    chosen = {name: variant.id for name, variant in found.chosen.items() if variant}
    if any(one.state == "swapped" for one in found.models):
        offered = [[(name, one.id) for one in case.model(name).variants] for name in chosen]
        assert not any(kept_with(case, dict(each)).fits() for each in product(*offered))
        return
    assert kept_with(case, chosen).fits()
    for name, folder in chosen.items():
        for better in case.model(name).variants[: [one.id for one in case.model(name).variants].index(folder)]:
            assert not kept_with(case, chosen | {name: better.id}).fits()


def test_a_variant_that_takes_its_share_of_two_gpus_is_not_the_smallest_one():
    share = {"gpu_memory_utilization": 0.4}
    split = variant("split", 1, tensor_parallel_sizes=[2], activations_gib=0.5)
    whole = variant("whole", 2, tensor_parallel_sizes=[1], activations_gib=0.5)
    others = (model("a", variant("a1", 1)), model("c", variant("c1", 4)))
    found = plan(config_of(model("b", split, whole, engine=share), *others), imagined("2x8"))
    assert isinstance(found, Plan)
    assert [one.state for one in found.models] == ["resident"] * 3


def test_a_larger_variant_on_one_gpu_is_begun_with_where_the_smallest_takes_a_part_of_each():
    whole = variant("whole", 1, activations_gib=0.5, kv_kib_per_token=256)
    split = variant("split", 2, activations_gib=0.5, tensor_parallel_sizes=[2])
    other = model("a", variant("a1", 1, activations_gib=0.5), engine={"gpu_memory_utilization": 0.95})
    found = plan(
        config_of(other, model("b", whole, split, engine={"context_length": 30000})), imagined("1x16+1x24", ram_gib=8)
    )
    assert isinstance(found, Plan)
    assert [(one.state, one.gpus) for one in found.models] == [("resident", (0,)), ("resident", (1,))]


def test_weights_that_wait_in_ram_are_said_to_lack_it():
    offloaded = variant("offloaded", 15, resident_gib=4, activations_gib=1)
    found = plan(config_of(model("a", offloaded)), imagined("1x24", ram_gib=8))
    assert isinstance(found, Refusal)
    assert re.fullmatch(r"a: offloaded, its smallest, keeps 15.0 GiB of weights in RAM; there are .*", found.message)
    assert "GiB more RAM" in found.change
