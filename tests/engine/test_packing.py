"""Models put into devices, to the byte: what fits exactly, where each goes, and who gets what is left."""

from typing import Any

from engine.config.models import VariantSpec
from engine.placement.hardware import GIB
from engine.placement.packing import (
    ASLEEP_BYTES,
    Layout,
    _part,
    _Want,
    add_replica,
    asleep_bytes,
    pack,
    shared_out,
    uses,
)
from engine.placement.types import Device, KvCache, Need, Placed

VARIANT = VariantSpec.model_validate({"folder": "w", "licence": "MIT", "weights_gib": 1, "runs_on": "any"})


def gpu(index: int, gib: float, foreign_gib: float = 0.0) -> Device:
    return Device(index, "GPU", int(gib * GIB), int(foreign_gib * GIB), 0)


def ram(gib: float) -> Device:
    return Device(None, "RAM", int(gib * GIB), 0, 0)


def image(gib: float, **more: Any) -> Need:
    """Without a KV cache: it takes what it takes."""
    return Need(**{"variant": VARIANT, "split": 1, "weights_bytes": int(gib * GIB), "activations_bytes": 0} | more)


def chat(gib: float, **more: Any) -> Need:
    """With a KV cache for one conversation of 1 GiB."""
    blocks = KvCache(GIB // 65, 128, full_groups=1, window_groups=0, window_tokens=0, state_groups=0)
    cache = {"kv_bytes": GIB, "cache": blocks, "context_length": 8192}  # 64 blocks, and one that is never given out
    return image(gib - 1, **cache | more)


def packed(devices: list[Device], shared: str = "", **needs: Need) -> Layout:
    found = pack({name: [need] for name, need in needs.items()}, devices, list(shared))
    assert found is not None
    return found


def places(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {name: one.gpus for name, one in layout.placed.items()}


def placed(layout: Layout) -> dict[str, Placed]:
    return {one.id: one for one in shared_out(layout)}


def used_gib(layout: Layout) -> list[float]:
    return [use.used_bytes / GIB for use in uses(layout.devices, shared_out(layout))]


def test_what_fits_exactly_fits_and_one_byte_more_does_not():
    devices = [gpu(0, 10), ram(1)]
    layout = packed(devices, a=image(6), b=image(4))
    assert layout.free(devices[0]) == 0
    assert pack({"a": [image(6)], "b": [image(4, activations_bytes=1)]}, devices) is None


def test_of_those_that_take_turns_the_largest_counts():
    devices = [gpu(0, 10), ram(1)]
    layout = packed(devices, "ab", a=image(6), b=image(5), c=image(4))
    assert [one.state for one in layout.placed.values()] == ["resident", "swapped", "swapped"]
    assert (layout.turn_bytes(0), layout.free(devices[0]), layout.turn_bytes(None)) == (6 * GIB, 0, 0)
    assert pack({"a": [image(7)], "b": [image(5)], "c": [image(4)]}, devices, "ab") is None


def test_the_largest_chooses_first_and_each_takes_the_emptiest():
    assert places(packed([gpu(0, 6), gpu(1, 10), ram(1)], a=image(3), b=image(6))) == {"a": (0,), "b": (1,)}
    assert places(packed([gpu(0, 8), gpu(1, 10), ram(1)], a=image(3))) == {"a": (1,)}
    same_room = [gpu(0, 8), gpu(1, 10, foreign_gib=2), ram(1)]
    assert places(packed(same_room, a=image(3))) == {"a": (1,)}


def test_the_search_goes_back_where_the_emptiest_was_wrong():
    layout = packed([gpu(0, 10), gpu(1, 8), ram(1)], a=image(4), b=image(6), c=image(8))
    assert places(layout) == {"a": (0,), "b": (0,), "c": (1,)}


def test_one_that_is_split_takes_neighbours_by_room_and_as_much_of_each():
    layout = packed([gpu(0, 4), gpu(1, 10), gpu(2, 8), ram(1)], a=image(8, split=2))
    assert places(layout) == {"a": (1, 2)}
    assert used_gib(layout) == [0, 8, 8, 0]
    assert pack({"a": [image(9, split=2)]}, layout.devices) is None


def test_what_may_be_taken_in_several_ways_is_taken_in_the_first_that_fits():
    devices = [gpu(0, 10), gpu(1, 10), ram(1)]
    found = pack({"a": [image(12), image(6, split=2)], "b": [image(4)]}, devices)
    assert found is not None
    assert places(found)["a"] == (0, 1)


def test_those_that_take_turns_share_few_devices():
    devices = [gpu(0, 10), gpu(1, 10), ram(1)]
    assert places(packed(devices, "ab", a=image(8), b=image(7), c=image(10))) == {"a": (1,), "b": (1,), "c": (0,)}
    assert places(packed(devices, "ab", a=image(8), b=image(7))) == {"a": (0,), "b": (0,)}
    larger = packed(devices, "ab", a=image(8), b=image(8), c=image(1))
    assert places(larger)["a"] == places(larger)["b"] != places(larger)["c"]


def test_a_search_that_takes_too_long_has_found_nothing():
    """None fits beside the others, whatever the order, and to be sure of that would take for ever."""
    devices = [gpu(index, 10 + index / 10) for index in range(8)]
    wanted = {str(number): [image(4 + number / 100)] for number in range(17)}
    assert pack(wanted, [*devices, ram(1)]) is None


def test_one_in_ram_takes_ram():
    layout = packed([gpu(0, 10), ram(4)], a=image(3, split=0), b=image(2, ram_bytes=GIB))
    assert places(layout) == {"a": (), "b": (0,)}
    assert used_gib(layout) == [2, 4]
    assert pack({"a": [image(3, split=0)], "b": [image(2, ram_bytes=GIB + 1)]}, layout.devices) is None


def test_a_share_that_models_yaml_gives_is_taken_whole_and_no_more():
    one = placed(packed([gpu(0, 20), ram(1)], a=chat(4, share=0.5)))["a"]
    assert (one.device_bytes, one.kv_bytes, one.utilization) == (10 * GIB, 7 * GIB, 0.5)
    assert pack({"a": [chat(4, share=0.1)]}, [gpu(0, 20), ram(1)]) is None


def test_what_is_left_but_an_eighth_of_what_is_stated_goes_to_the_kv_caches_in_even_parts():
    one = placed(packed([gpu(0, 12), ram(1)], a=chat(3, activations_bytes=GIB)))["a"]
    assert (one.device_bytes, one.kv_bytes) == (12 * GIB - 3 * GIB // 8, 9 * GIB - 3 * GIB // 8)
    assert (one.state, one.swap_by, one.utilization) == ("resident", None, 0.8854), "without working memory"
    known = placed(packed([gpu(0, 12), ram(1)], a=chat(3, activations_bytes=GIB, measured=True)))["a"]
    assert known.device_bytes == 12 * GIB - GIB // 8
    two = placed(packed([gpu(0, 16), ram(1)], a=chat(4), b=chat(4), c=image(0.5)))
    left = int((16 - 8.5 - 6.5 / 8) * GIB / 2)
    assert [two[name].device_bytes for name in "abc"] == [4 * GIB + left, 4 * GIB + left, GIB // 2]
    assert two["c"].kv_bytes == 0


def test_a_cache_of_a_fixed_size_and_one_in_ram_do_not_grow():
    found = placed(packed([gpu(0, 12), ram(12)], a=chat(4, fixed_kv=True), b=chat(4, split=0), c=chat(4)))
    assert [found[name].device_bytes for name in "ab"] == [4 * GIB, 4 * GIB]
    assert found["c"].device_bytes == 7.25 * GIB
    assert (found["b"].utilization, found["b"].kv_bytes) == (None, GIB)


def test_of_its_turn_a_chat_model_gets_all():
    layout = packed([gpu(0, 12), ram(1)], "ab", a=chat(4), b=image(8))
    found = placed(layout)
    assert found["a"].device_bytes == (8 + 3) * GIB
    assert found["b"].device_bytes == 8 * GIB
    assert {one.swap_by for one in found.values()} == {"unload"}
    assert used_gib(layout) == [11, 0]


def test_one_that_shares_with_no_other_is_resident():
    alone = packed([gpu(0, 8), gpu(1, 8), ram(1)], "a", a=image(8), b=image(8))
    one_in_ram = packed([gpu(0, 8), ram(8)], "ab", a=image(8), b=image(8, split=0))
    for found in (placed(alone), placed(one_in_ram)):
        assert {(one.state, one.swap_by) for one in found.values()} == {("resident", None)}


def test_what_sleepers_keep_is_of_all_but_the_one_that_is_awake():
    assert [asleep_bytes(count) for count in (0, 1, 2, 3)] == [0, 0, ASLEEP_BYTES, 2 * ASLEEP_BYTES]


def test_chat_models_sleep_where_ram_holds_their_weights_to_the_byte():
    needs = {"a": chat(8), "b": chat(7)}
    asleep = packed([gpu(0, 10), ram(13)], "ab", **needs)
    found = placed(asleep)
    assert {one.swap_by for one in found.values()} == {"sleep"}
    assert {one.state for one in found.values()} == {"swapped"}
    assert [found[name].ram_bytes for name in "ab"] == [7 * GIB, 6 * GIB]
    more = int(0.75 * 1.25 * GIB)
    assert [found[name].device_bytes for name in "ab"] == [8 * GIB + more, 8 * GIB + more]
    assert used_gib(asleep) == [8 + (more + ASLEEP_BYTES) / GIB, 13]
    awake = placed(packed([gpu(0, 10), Device(None, "RAM", 13 * GIB - 1, 0, 0)], "ab", **needs))
    assert {one.swap_by for one in awake.values()} == {"unload"}
    assert [awake[name].ram_bytes for name in "ab"] == [0, 0]


def test_chat_models_sleep_where_the_gpu_holds_what_they_keep_to_the_byte():
    needs = {"a": chat(8), "b": chat(7)}
    room = 8 * GIB + ASLEEP_BYTES
    for budget, way in ((room, "sleep"), (room - 1, "unload")):
        layout = packed([Device(0, "GPU", budget, 0, 0), ram(20)], "ab", **needs)
        assert {one.swap_by for one in placed(layout).values()} == {way}


def test_weights_of_a_split_model_sleep_whole():
    found = placed(packed([gpu(0, 10), gpu(1, 10), ram(30)], "ab", a=chat(8, split=2), b=chat(8, split=2)))
    assert [found[name].ram_bytes for name in "ab"] == [14 * GIB, 14 * GIB]


def test_a_chat_model_alone_among_others_is_ended_and_so_are_images():
    found = placed(packed([gpu(0, 10), ram(99)], "abi", a=chat(8), b=chat(7), i=image(6)))
    assert {name: one.swap_by for name, one in found.items()} == {"a": "sleep", "b": "sleep", "i": "unload"}
    found = placed(packed([gpu(0, 10), ram(99)], "ai", a=chat(8), i=image(6)))
    assert {one.swap_by for one in found.values()} == {"unload"}


def parts(left: int, **wants: tuple[int, int]) -> dict[str, int]:
    asked = {name: _Want(*want) for name, want in wants.items()}
    return {name: _part(left, asked, name) for name in asked}


def test_as_many_as_possible_get_one_long_conversation_and_the_rest_is_divided():
    assert parts(10, b=(10, 30), a=(10, 30)) == {"a": 10, "b": 0}, "on a draw by name"
    assert parts(9, b=(10, 30), a=(10, 30)) == {"a": 4, "b": 5}, "for nobody enough: evenly"
    assert parts(50, b=(60, 60), a=(20, 25)) == {"a": 25, "b": 25}, "no more than the longest context of one"
    assert parts(100, b=(20, 30), a=(10, 20)) == {"a": 20 + 25, "b": 30 + 25}, "what is left of all that, evenly"


def replica(devices: list[Device], need: Need, first_gpu: int = 0, **others: Placed) -> tuple[bool, Layout]:
    """Whether there is room for one more engine of a model on `first_gpu`, and the layout after it."""
    first = Placed("a", "resident", "", VARIANT, need, (first_gpu,), need.least_bytes, kv_bytes=need.kv_bytes)
    layout = Layout(devices, {"a": first, **others})
    return add_replica(layout, first, "a#2"), layout


def test_a_replica_takes_room_to_the_last_byte_on_a_gpu_without_a_chat_model():
    devices = [gpu(0, 10), gpu(1, 6), ram(1)]
    made, layout = replica(devices, chat(6))
    assert (made, layout.placed["a#2"].gpus, layout.free(devices[1])) == (True, (1,), 0)
    made, layout = replica([gpu(0, 20), gpu(1, 6), ram(1)], chat(6, activations_bytes=1))
    assert (made, set(layout.placed)) == (False, {"a"})


def test_a_replica_goes_to_the_fullest_gpu_that_has_room_whoever_takes_turns_there():
    turning = Placed("i", "swapped", "", VARIANT, image(3), (2,), 3 * GIB)
    made, layout = replica([gpu(0, 8), gpu(1, 10), gpu(2, 10), ram(1)], chat(6), i=turning)
    assert (made, layout.placed["a#2"].gpus) == (True, (2,))


def test_a_replica_has_the_context_of_the_first():
    for longest, context in ((0, 0), (131_072, 8192)):
        made, layout = replica([gpu(0, 10), gpu(1, 10), ram(1)], chat(6, longest_context=longest))
        need = layout.placed["a#2"].need
        assert made
        assert need is not None
        assert need.longest_context == context
