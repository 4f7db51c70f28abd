"""What goes where, and why not: tables of small machines, and properties of plans for any machine."""

import random
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_parts import config_of, model, shipped, variant

from engine.config.models import AdapterSpec
from engine.placement.hardware import GIB, Gpu, Hardware, Holder, imagined
from engine.placement.needs import Footprints, devices_of, in_steps
from engine.placement.plan import plan
from engine.placement.report import as_data, warnings_of
from engine.placement.types import Plan, Refusal

FIFTH = {"gpu_memory_utilization": 0.2}
BIG, SMALL = variant("big", 14, activations_gib=1), variant("small", 4, activations_gib=1)


def planned(machine: str | Hardware, *models, **more) -> Plan:
    hardware = imagined(machine) if isinstance(machine, str) else machine
    found = plan(config_of(*models), hardware, **more)
    assert isinstance(found, Plan), found
    return found


def refused(machine: str, *models) -> Refusal:
    found = plan(config_of(*models), imagined(machine))
    assert isinstance(found, Refusal)
    return found


@pytest.mark.parametrize(
    ("machine", "chosen", "states"),
    [
        ("1x8", ("small", "small"), {"swapped"}),
        ("1x16", ("small", "small"), {"resident"}),
        ("1x24", ("big", "small"), {"resident"}),
        ("1x48", ("big", "big"), {"resident"}),
        ("2x24", ("big", "big"), {"resident"}),
    ],
)
def test_each_takes_the_best_that_fits_beside_the_others(machine: str, chosen, states):
    found = planned(machine, model("a", BIG, SMALL), model("b", BIG, SMALL))
    assert tuple(one.variant.id for one in found.models) == chosen
    assert {one.state for one in found.models} == states


@pytest.mark.parametrize(
    ("machine", "chosen", "states"),
    [
        ("1x8", ("small", "small"), {"swapped"}),
        ("1x16", ("big", "big"), {"swapped"}),
        ("1x48", ("big", "big"), {"resident"}),
        ("2x24", ("big", "big"), {"resident"}),
    ],
)
def test_where_quality_is_preferred_models_take_turns_for_better_variants_and_only_for_these(machine, chosen, states):
    hardware = replace(imagined(machine), prefer="quality")
    found = planned(hardware, model("a", BIG, SMALL), model("b", BIG, SMALL))
    assert tuple(one.variant.id for one in found.models) == chosen
    assert {one.state for one in found.models} == states


def test_with_quality_what_has_to_stay_loaded_stays():
    hardware = replace(imagined("1x24"), prefer="quality")
    found = planned(hardware, model("a", BIG, SMALL, keep_loaded=True), model("b", BIG, SMALL))
    assert [(one.variant.id, one.state) for one in found.models] == [("big", "resident"), ("small", "resident")]


def test_a_model_too_large_for_one_gpu_is_split_over_as_few_as_will_do():
    large = variant("large", 60, tensor_parallel_sizes=[1, 2, 4])
    assert [len(planned(f"{count}x48", model("a", large)).models[0].gpus) for count in (2, 4)] == [2, 2]
    assert planned("4x24", model("a", large)).models[0].gpus == (0, 1, 2, 3)
    assert isinstance(plan(config_of(model("a", large)), imagined("2x24")), Refusal)


def test_gpus_of_different_sizes_are_used_for_what_fits_each():
    found = planned("1x8+1x24", model("a", BIG | {"weights_gib": 18}), model("b", SMALL))
    assert [one.gpus for one in found.models] == [(1,), (0,)]


def test_kv_cache_holds_the_full_length_conversations_asked_for_and_gets_most_of_what_is_left():
    chatty = variant("chatty", 4, activations_gib=1, kv_kib_per_token=128, context_length=8192, chats=2)
    one = planned("1x24", model("a", chatty)).models[0]
    block = 16 * 128 * 1024  # one is never given out
    assert one.need.kv_bytes == 2 * GIB + block
    left = 24 * GIB - int(0.05 * 24 * GIB) - 7 * GIB - block
    assert one.kv_bytes == 2 * GIB + block + left - 5 * GIB // 8
    assert (one.chats, one.context_length) == (17, 8192)
    asked = one.device_bytes - GIB  # vLLM looks for it when CUDA has taken some of its working memory
    assert asked - GIB // 100 < one.utilization * 24 * GIB <= asked


def test_what_is_left_goes_to_longer_conversations_first():
    growing = variant("v", 4, kv_kib_per_token=128, context_length=8192, max_context_length=65536, chats=1)
    one = planned("1x24", model("a", growing)).models[0]
    assert (one.context_length, one.chats) == (65536, 2)
    small = planned("1x12", model("a", growing)).models[0]
    assert (small.context_length, small.chats) == (47104, 1), "as much as there is room for"
    many = planned("1x24", model("a", growing, prefer="conversations")).models[0]
    assert (many.context_length, many.chats, many.kv_bytes) == (8192, 17, one.kv_bytes)
    said = planned("1x24", model("a", growing, engine={"context_length": 16384})).models[0]
    assert (said.context_length, said.chats) == (16384, 8)
    share = planned("1x24", model("a", growing, engine={"gpu_memory_utilization": 0.9})).models[0]
    assert share.context_length == 8192, "vLLM may find less than was reckoned"


def test_a_kv_cache_of_8_bits_holds_twice_as_much():
    growing = variant("v", 4, kv_kib_per_token=128, context_length=8192, max_context_length=262144, chats=1)
    wide, narrow = (
        planned("1x16", model("a", growing, engine={"kv_cache_dtype": kind})).models[0] for kind in ("auto", "fp8")
    )
    assert narrow.kv_bytes >= wide.kv_bytes - GIB
    assert 1.9 < narrow.context_length / wide.context_length < 2.1


def test_one_long_conversation_goes_before_even_parts():
    cheap = variant("cheap", 4, kv_kib_per_token=16, max_context_length=131072)
    dear = variant("dear", 4, kv_kib_per_token=128, max_context_length=131072)
    found = planned("1x16", model("a", cheap), model("b", dear))
    assert found.models[0].context_length >= 65536
    assert not warnings_of(found)
    (warning,) = warnings_of(planned("1x8", model("b", dear)))
    assert "No model takes a conversation of 65536 tokens" in warning


def test_kv_heads_limit_how_far_the_cache_is_split():
    wide = variant("wide", 40, kv_kib_per_token=64, kv_heads=2, tensor_parallel_sizes=[4])
    assert planned("4x24", model("a", wide)).models[0].need.one_chat_bytes == (8192 + 128) * 64 * 1024 // 2


def test_what_models_yaml_says_wins():
    chatty = variant("chatty", 4, kv_kib_per_token=128, tensor_parallel_sizes=[1, 2])
    engine = {"context_length": 4096, "kv_cache_gib": 3.0, "tensor_parallel_size": 2}
    one = planned("2x24", model("a", chatty, engine=engine)).models[0]
    assert (one.need.context_length, one.kv_bytes, one.gpus) == (4096, 3 * GIB, (0, 1))
    shared = planned("1x24", model("a", chatty, engine={"gpu_memory_utilization": 0.5})).models[0]
    assert shared.device_bytes == 12 * GIB


def test_shares_that_add_up_to_more_than_the_gpu_take_turns():
    engine = {"gpu_memory_utilization": 0.6}
    found = planned("1x24", model("a", SMALL, engine=engine), model("b", SMALL, engine=engine))
    assert {one.state for one in found.models} == {"swapped"}


def test_images_give_way_before_chat_and_voices_never_do():
    voices = model("v", variant("voices/x", 0.4, runs_on="cpu"), task="speech")
    found = planned(
        "1x16", model("i", SMALL | {"weights_gib": 9}, task="image"), model("a", SMALL), model("z", SMALL), voices
    )
    assert {one.id: one.state for one in found.models} == {
        "i": "swapped",
        "a": "resident",
        "z": "swapped",
        "v": "resident",
    }


def test_weights_of_chat_models_that_take_turns_sleep_in_ram_where_it_holds_them():
    chats = [model(name, variant(name, 12, activations_gib=1)) for name in "ab"]
    assert {one.swap_by for one in planned("1x24", *chats).models} == {"sleep"}
    small_ram = imagined("1x24", ram_gib=16)
    assert {one.swap_by for one in planned(small_ram, *chats).models} == {"unload"}


def test_the_demo_answers_where_nothing_fits_and_says_what_would_change_that():
    found = planned("1x8", model("a", BIG, demo="chat"))
    assert (found.models[0].state, found.chosen["a"]) == ("demo", None)
    assert "Smallest change: a GPU of 16 GiB" in found.models[0].why


def test_without_a_demo_it_is_refused_with_the_numbers_and_the_smallest_change():
    found = refused("1x8", model("a", BIG))
    assert found.needed_bytes == 15 * GIB
    assert "needs 15.0 GiB on one GPU; there are 7.5 GiB of 8.0 GiB" in found.message
    assert found.change == "a GPU of 16 GiB"


def test_a_shorter_context_is_the_smallest_change_where_that_will_do():
    long = variant("long", 4, activations_gib=1, kv_kib_per_token=128, context_length=32768, chats=1)
    found = refused("1x8", model("a", long))
    assert found.change == "context_length: 19456 in place of 32768"
    assert planned("1x8", model("a", long, engine={"context_length": 19456})).models[0].chats == 1


def test_a_share_that_is_too_small_is_refused_with_one_that_is_not():
    found = refused("1x24", model("a", BIG, engine={"gpu_memory_utilization": 0.3}))
    assert "gpu_memory_utilization 0.3 gives it 7.2 GiB" in found.message
    assert found.change.startswith("gpu_memory_utilization: 0.63 for a")


def test_a_share_that_others_leave_no_room_for_is_refused_with_the_nearest_that_they_do():
    busy = replace(imagined("cpu"), gpus=(Gpu(0, "GPU", 24 * GIB, int(13.3 * GIB)),))
    found = plan(config_of(model("a", SMALL, engine={"gpu_memory_utilization": 0.95})), busy)
    assert isinstance(found, Refusal)
    offered = "gpu_memory_utilization: 0.50 for a, or end the other processes there, which hold 10.7 GiB"
    assert found.change == offered


def test_of_others_in_ram_what_the_running_server_has_is_none():
    machine = replace(imagined("cpu", ram_gib=24), ram_available_bytes=10 * GIB, ram_ours_bytes=6 * GIB)
    found = plan(config_of(model("a", variant("a1", 16, runs_on="cpu"))), machine)
    assert isinstance(found, Refusal)
    assert found.change == "end the other processes there, which hold 8.0 GiB"


def test_of_gpus_that_a_model_is_split_over_the_smallest_is_too_small():
    found = refused("1x16+1x8", model("a", variant("wide", 18, tensor_parallel_sizes=[2])))
    assert "needs 10.0 GiB on each of 2 GPUs; there are 7.5 GiB of 8.0 GiB" in found.message
    assert "2.5 GiB too little" in found.message
    assert found.change == "2 GPUs of 16 GiB"


def test_a_larger_gpu_takes_the_place_of_the_largest_and_what_others_hold_there_stays():
    gpus = Gpu(0, "GPU", 16 * GIB, 16 * GIB), Gpu(1, "GPU", 24 * GIB, 14 * GIB)
    found = plan(config_of(model("a", variant("a1", 22))), replace(imagined("cpu"), gpus=gpus))
    assert isinstance(found, Refusal)
    assert found.change == "a GPU of 40 GiB"


def test_a_model_begins_with_its_smallest_variant_wherever_that_is_listed():
    kept = [model(name, variant(name, size, runs_on="any"), keep_loaded=True) for name, size in (("b", 10), ("c", 6))]
    wide = model("a", variant("wide", 18, tensor_parallel_sizes=[2]), variant("narrow", 14), keep_loaded=True)
    assert planned("1x24+1x12", wide, *kept).chosen["a"].id == "narrow", "wide leaves no room for b"
    small, large = (variant(name, size, runs_on="any") for name, size in (("small", 4), ("large", 16)))
    beside = planned(imagined("cpu", ram_gib=24), model("a", small, large, keep_loaded=True), kept[0])
    assert beside.chosen["a"].id == "small"


def test_where_models_do_not_fit_the_last_that_has_a_demo_is_served_with_that():
    kept = [model(name, BIG | {"folder": name * 2}, keep_loaded=True, demo="chat") for name in "ab"]
    found = planned("1x24", *kept, model("c", SMALL))
    assert [one.state for one in found.models] == ["resident", "demo", "resident"]


def test_where_not_even_the_demo_fits_its_size_is_said():
    found = plan(config_of(model("a", BIG, demo="chat")), imagined("cpu", ram_gib=2))
    assert isinstance(found, Refusal)
    assert found.message.startswith("a: demo, its smallest, needs 0.8 GiB in RAM; there are 0.0 GiB of 2.0 GiB")


def test_where_no_memory_would_do_one_demo_is_offered_and_one_model_less():
    voices = model("v", variant("voices/x", 1500, runs_on="cpu"), task="speech")
    found = plan(config_of(model("a", variant("a1", 1500, runs_on="cpu")), voices), imagined("cpu", ram_gib=2048))
    assert isinstance(found, Refusal)
    assert found.change == "give a a `demo` in models.yaml, or take a out of models.yaml"


def test_too_old_gpus_are_said_to_be_so():
    old = replace(imagined("1x24").gpus[0], compute_capability=(7, 5))
    machine = replace(imagined("cpu"), gpus=(old,))
    found = plan(config_of(model("a", SMALL | {"min_compute_capability": 8.0})), machine)
    assert "compute capability 8.0" in found.message


def test_models_of_which_nothing_is_known_are_named_and_not_dropped():
    found = planned("1x24", model("a"), model("b", SMALL), folders={"a": ()})
    assert [one.state for one in found.models] == ["unplanned", "resident"]
    assert "does not say how large it is" in found.models[0].why


def test_only_what_is_here_is_planned_with_if_that_is_asked():
    voices = model("v", variant("voices/x", 0.4, runs_on="cpu"), task="speech")
    assert planned("1x24", model("a", BIG, SMALL), here={"small"}).chosen["a"].id == "small"
    nothing, spoken = planned("1x24", model("a", SMALL), voices, here=()).models
    assert (nothing.state, spoken.state) == ("unplanned", "resident"), "voices are used side by side"
    assert nothing.why == "None of its variants is here, and models.yaml names no demo."
    (unknown,) = planned("1x24", model("a"), here=()).models
    assert unknown.why.startswith("No variants and no demo in models.yaml")
    own = {"a": model("a", SMALL | {"folder": "a"}).variants}
    assert planned("1x24", model("a", BIG), here=(), folders=own).models[0].why.endswith("that you put there.")


def test_no_demo_answers_for_a_folder_that_somebody_put_there():
    spec = model("a", BIG, demo="chat")
    assert planned("1x8", spec).models[0].state == "demo"
    found = plan(config_of(spec, model("b", SMALL)), imagined("1x8"), folders={"a": spec.variants})
    assert isinstance(found, Refusal)
    assert found.change == "a GPU of 16 GiB"
    larger = {"a": model("a", variant("a", 400)).variants}
    found = plan(config_of(spec, model("b", SMALL)), imagined("1x8"), folders=larger)
    assert found.change == "take a out of models.yaml"


def test_adapters_take_room_beside_their_model():
    adapters = [
        AdapterSpec(id=name, task="adapter", base="a", weights=name, tier="standard")
        for name in ("x", "y", "unreadable")
    ]
    folders = {name: model("a", variant(name, 1.5)).variants for name in "xy"} | {"other": model("a", BIG).variants}
    config = replace(config_of(model("a", SMALL)), adapters={one.id: one for one in adapters})
    found = plan(config, imagined("1x24"), folders=folders)
    assert found.models[0].need.adapters_bytes == 3 * GIB
    assert found.models[0].device_bytes == 8 * GIB


def test_memory_that_others_hold_is_not_planned_with_but_our_own_is():
    holders = (Holder(7, "other", 6 * GIB), Holder(8, "ours", 10 * GIB, ours=True))
    gpu = Gpu(0, "x", 24 * GIB, 8 * GIB, holders=holders)
    machine = replace(imagined("cpu"), gpus=(gpu,))
    assert gpu.foreign_bytes == 6 * GIB
    assert devices_of(machine)[0].budget_bytes == 24 * GIB - 6 * GIB - int(0.05 * 24 * GIB)
    unknown = replace(gpu, holders=(Holder(8, "ours", None, ours=True),))
    assert unknown.foreign_bytes == 0


def test_the_plan_does_not_follow_every_change_of_free_ram_and_never_plans_with_more_than_is_free():
    machine = imagined("cpu", ram_gib=24)
    spec = model("a", variant("large", 16, runs_on="cpu"), variant("small", 4, runs_on="cpu"))
    chosen = []
    for taken_mib in range(1, 3 * 1024, 64):
        now = replace(machine, ram_available_bytes=machine.ram_bytes - (taken_mib << 20))
        ram = devices_of(now)[-1]
        assert ram.foreign_bytes == 3 * GIB
        assert ram.budget_bytes <= now.ram_available_bytes - ram.margin_bytes
        chosen.append(planned(now, spec).chosen["a"].id)
    assert set(chosen) == {"large"}
    busy = replace(machine, ram_available_bytes=12 * GIB)
    assert planned(busy, spec).chosen["a"].id == "small"


@given(st.integers(0, 512 * GIB), st.integers(GIB, 1024 * GIB))
def test_ram_of_others_is_rounded_up_by_a_step_at_most(taken: int, total: int):
    counted = in_steps(taken, total)
    assert taken <= counted < taken + max(GIB, total // 8)


@pytest.mark.parametrize(
    ("machine", "more", "engines"),
    [
        ("4x24", {}, [("a", (0,)), ("a#2", (1,)), ("a#3", (2,)), ("a#4", (3,))]),
        ("4x24", {"replicas": 2}, [("a", (0,)), ("a#2", (1,))]),
        ("4x24", {"replicas": 1}, [("a", (0,))]),
        ("4x24", {"unload_after_seconds": 60}, [("a", (0,))]),
        ("64x8", {}, [("a", (0,)), *((f"a#{at + 1}", (at,)) for at in range(1, 64))]),
        ("1x48", {"replicas": 2}, [("a", (0,))]),  # one GPU computes no faster for two
        ("cpu", {}, [("a", ())]),
        ("cpu", {"replicas": 3}, [("a", ()), ("a#2", ()), ("a#3", ())]),
        ("cpu", {"replicas": 64}, [("a", ()), *((f"a#{number}", ()) for number in range(2, 12))]),  # of 57.6 GiB
    ],
)
def test_a_chat_model_gets_more_engines_where_it_may(machine: str, more, engines):
    found = planned(machine, model("a", SMALL | {"runs_on": "any"}, **more))
    assert [(one.id, one.gpus) for one in found.engines] == engines
    assert (found.of("a#9") is None) == (len(engines) < 9)
    data = as_data(found, found.hardware)["models"][0]["replicas"]
    assert [(one["id"], tuple(one["gpus"])) for one in data] == engines[1:]


def test_models_get_more_engines_in_turn():
    found = planned("8x24", model("a", SMALL), model("b", BIG | {"tensor_parallel_sizes": [2]}))
    assert sorted(one.id for one in found.engines) == ["a", "a#2", "a#3", "a#4", "b", "b#2"]
    images = model("i", variant("i", 15), task="image")
    beside = planned("2x24", model("a", SMALL), images)
    assert [one.id for one in beside.engines] == ["a", "a#2", "i"], "beside images there is room"
    assert beside.engines[1].gpus == beside.of("i").gpus


def test_what_was_measured_replaces_what_was_stated():
    spec = model("a", BIG, SMALL)
    assert planned("1x16", spec).chosen["a"].id == "big"
    measured = Footprints().with_(spec.variants[0], 1, "GPU", int(15.5 * GIB))
    found = planned("1x16", spec, footprints=measured)
    assert found.chosen["a"].id == "small"
    assert "(measured)" not in found.models[0].why
    slimmer = Footprints().with_(spec.variants[0], 1, "GPU", 12 * GIB)
    assert "12.0 GiB weights (measured)" in planned("1x16", spec, footprints=slimmer).models[0].why


def test_where_models_fit_in_turns_without_keep_loaded_that_is_offered_first():
    voices = model("v", variant("voices/x", 0.4, runs_on="cpu"), task="speech")
    kept = [model(name, BIG | {"folder": name * 2}, keep_loaded=True) for name in "abc"]
    found = refused("1x16", *kept, voices)
    assert found.models == ("a", "b", "c")
    assert "do not fit while a, b, c stay loaded (`keep_loaded`)" in found.message
    assert found.change == (
        "take the lines `keep_loaded: true` of a, b, c out of models.yaml, so that models take turns"
    )
    one_of_two = refused(
        "1x24", model("a", BIG, keep_loaded=True), model("b", BIG | {"folder": "b2"}, keep_loaded=True)
    )
    assert "the lines `keep_loaded: true` of a, b out" in one_of_two.change
    with_little = refused("1x24", *kept[:2], model("z", SMALL | {"folder": "z2"}, keep_loaded=True))
    assert "of a, b out" in with_little.change, "z may stay loaded"
    one = refused("1x16", model("a", SMALL, keep_loaded=True), model("b", BIG))
    assert one.change == "take the line `keep_loaded: true` of a out of models.yaml, so that models take turns"


def test_a_context_is_offered_only_if_all_models_fit_with_it():
    config = shipped()
    plus = config.models["service-plus"]

    def with_context(length: int) -> Plan | Refusal:
        engine = plus.engine.model_copy(update={"context_length": length})
        models = {**config.models, plus.id: plus.model_copy(update={"demo": None, "engine": engine})}
        machine = imagined("cpu", ram_gib=24)
        return plan(replace(config, models=MappingProxyType(models)), machine)

    found = with_context(131072)
    assert isinstance(found, Refusal)
    offered = int(found.change.removeprefix("context_length: ").partition(" ")[0])
    assert found.change == f"context_length: {offered} in place of 131072"
    assert isinstance(with_context(offered), Plan)
    assert isinstance(with_context(offered + 1024), Refusal), "no longer one fits"


@pytest.mark.parametrize(
    ("machine", "models", "change"),
    [
        ("1x16", [model("a", BIG), model("b", variant("b2", 30))], "a GPU of 40 GiB"),
        ("2x16", [model("a", variant("a2", 40, tensor_parallel_sizes=[2]))], "2 GPUs of 24 GiB"),
        (imagined("cpu", ram_gib=8), [model("a", variant("a2", 9, runs_on="cpu"))], "4.0 GiB more RAM"),
        (imagined("cpu", ram_gib=8), [model("a", variant("a2", 906, runs_on="cpu"))], "999.8 GiB more RAM"),
        (imagined("cpu", ram_gib=8), [model("a", variant("a2", 908, runs_on="cpu"))], "give a a `demo` in models.yaml"),
        (
            "1x24",
            [model("a", variant("a2", 22.7, activations_gib=0), engine=FIFTH)],
            "gpu_memory_utilization: 0.95 for a",
        ),
        ("1x24", [model("a", variant("a2", 22.9, activations_gib=0), engine=FIFTH)], "a GPU of 141 GiB"),
    ],
)
def test_more_memory_is_offered_as_much_as_all_models_need(machine, models, change):
    found = plan(config_of(*models), imagined(machine) if isinstance(machine, str) else machine)
    assert isinstance(found, Refusal)
    assert found.change == change


# Properties, for any models and machine.

_variants = st.lists(
    st.builds(
        lambda name, size, kv, splits, runs_on: variant(
            f"v{name}", size, kv_kib_per_token=kv, tensor_parallel_sizes=splits, runs_on=runs_on
        ),
        st.integers(0, 99),
        st.floats(0.5, 90),
        st.floats(0, 200),
        st.sampled_from([[1], [1, 2], [2, 4], [1, 2, 4, 8]]),
        st.sampled_from(["gpu", "gpu", "gpu", "any", "cpu"]),
    ),
    max_size=4,
    unique_by=lambda one: one["folder"],
)
_TASKS = ["chat", "image", "embedding", "rerank", "transcription"]
_DEMOS = {"speech": "voices", **{task: task for task in _TASKS}}
_models = st.lists(
    st.tuples(_variants, st.sampled_from(["chat", "speech", *_TASKS]), st.booleans()),
    min_size=1,
    max_size=5,
).map(
    lambda all_: [
        model(f"m{at}", *variants, task=task, demo=_DEMOS[task] if has_demo else None)
        for at, (variants, task, has_demo) in enumerate(all_)
    ]
)
_machines = st.tuples(
    st.lists(st.sampled_from([8, 12, 16, 24, 48, 80, 141]), max_size=6), st.sampled_from([8, 16, 64, 256])
).map(lambda shape: imagined("+".join(f"{size}GiB" for size in shape[0]) or "cpu", ram_gib=shape[1]))


@settings(max_examples=150)
@given(_models, _machines)
def test_no_device_is_ever_exceeded_and_no_model_dropped(models, machine):
    found = plan(config_of(*models), machine)
    if isinstance(found, Refusal):
        assert found.models
        assert found.message
        assert found.change
        return
    assert [one.id for one in found.models] == [spec.id for spec in models]
    for use in found.devices:
        assert use.used_bytes <= use.device.budget_bytes
    for one in found.models:
        assert one.state in {"resident", "swapped", "demo", "unplanned"}
        assert one.why
        assert (one.variant is None) == (one.state in {"demo", "unplanned"})
        assert one.swap_by is not None if one.state == "swapped" else one.swap_by is None or one.state == "demo"
    turns = [one for one in found.models if one.swap_by is not None]
    for one in turns:
        assert any(set(one.gpus) & set(other.gpus) or not one.gpus for other in turns if other is not one)
    for device in found.devices[:-1]:
        # Counted anew, from what each model is told it may take
        here = [one for one in found.engines if device.device.index in one.gpus]
        resident = sum(one.device_bytes for one in here if one.swap_by is None)
        turn = max((one.device_bytes for one in here if one.swap_by is not None), default=0)
        assert resident + turn <= device.device.budget_bytes


@settings(max_examples=80)
@given(_models, _machines)
def test_replicas_have_the_context_of_their_model_and_take_nothing_from_others(models, machine):
    found = plan(config_of(*models), machine)
    alone = plan(config_of(*(spec if spec.task != "chat" else only_one(spec) for spec in models)), machine)
    if isinstance(found, Refusal) or isinstance(alone, Refusal):
        assert found == alone
        return
    assert tuple(replace(one, replicas=()) for one in found.models) == alone.models
    chats = [one for one in found.engines if one.context_length and one.gpus]
    for first in found.models:
        for one in first.replicas:
            assert first.state == "resident"
            assert (one.variant, one.context_length) == (first.variant, first.context_length)
            assert one.kv_bytes >= 0
            assert one.sequences is None or one.sequences >= 1
            assert not any(set(one.gpus) & set(other.gpus) for other in chats if other is not one)


def only_one(spec):
    return spec.model_copy(update={"replicas": 1})


@settings(max_examples=80)
@given(_models, _machines, st.randoms(use_true_random=False))
def test_the_order_of_models_and_gpus_changes_nothing(models, machine, chance: random.Random):
    first = plan(config_of(*models), machine)
    shuffled = list(models)
    chance.shuffle(shuffled)
    gpus = list(machine.gpus)
    chance.shuffle(gpus)
    gpus = tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))
    second = plan(config_of(*shuffled), replace(machine, gpus=gpus))
    assert _essence(first) == _essence(second)


def _essence(found: Plan | Refusal) -> object:
    if isinstance(found, Refusal):
        return sorted(found.models), found.needed_bytes
    sizes = {use.device.index: use.device.total_bytes for use in found.devices}
    return sorted(
        (
            one.id,
            one.state,
            one.variant.id if one.variant else "",
            one.device_bytes,
            sorted(sizes[gpu] for gpu in one.gpus),
        )
        for one in found.models
    )


def test_the_shipped_models_fit_every_shape_with_no_model_left_out():
    for shape in ("1x8", "1x16", "1x24", "1x48", "1x80", "1x141", "2x24", "4x24", "8x80"):
        found = plan(shipped(), imagined(shape))
        assert isinstance(found, Plan)
        assert {one.state for one in found.models} <= {"resident", "swapped"}
        assert as_data(found, found.hardware)["fits"]


@pytest.mark.parametrize(
    ("machine", "chosen", "turns"),
    [
        (
            "1x24",
            "big",
            {"image", "vectors", "ranks", "words"},
        ),  # beside the chat model there is room for one of the image's size
        ("1x32", "big", set()),
        ("1x16", "small", {"image", "vectors", "ranks", "words"}),  # as without them
    ],
)
def test_vectors_ranks_and_words_take_turns_with_images_before_a_chat_model_gets_smaller(
    machine: str, chosen: str, turns
):
    models = [
        model("chat", BIG, SMALL),
        model("image", variant("pictures", 5), task="image"),
        model("vectors", variant("vectors", 2), task="embedding"),
        model("ranks", variant("ranks", 2), task="rerank"),
        model("words", variant("words", 2), task="transcription"),
    ]
    found = planned(machine, *models)
    assert found.models[0].variant.id == chosen
    assert {one.id for one in found.models if one.state == "swapped"} == turns
    alone = planned(machine, *models[:2])
    assert alone.models[0].variant == found.models[0].variant


def test_without_images_a_smaller_chat_model_stays_loaded_beside_vectors_and_ranks():
    pooling = [model(task, variant(task, 2), task=task) for task in ("embedding", "rerank")]
    found = planned("1x20", model("chat", BIG, SMALL), *pooling)
    assert [one.variant.id for one in found.models] == ["small", "embedding", "rerank"]
    assert {one.state for one in found.models} == {"resident"}


def test_where_there_are_only_vectors_and_ranks_they_take_turns_among_themselves():
    found = planned("1x8", *(model(task, variant(task, 4), task=task) for task in ("embedding", "rerank")))
    assert {one.state for one in found.models} == {"swapped"}


def test_chat_models_take_better_variants_before_images_do():
    pictures, middle = (variant("large", 9), variant("pictures", 4)), variant("middle", 8)
    found = planned("1x24", model("image", *pictures, task="image"), model("chat", BIG, middle, SMALL))
    assert {one.id: one.variant.id for one in found.models} == {"image": "pictures", "chat": "big"}
