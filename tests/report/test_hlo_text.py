"""Printed forms that the installed XLA for CPU does not write: other versions, other back-ends."""

from __future__ import annotations

import pytest

from autopar.errors import AuditError
from autopar.report.hlo import HloMember, read_hlo
from autopar.report.hlo_groups import axes_of_groups, axes_of_pairs, parse_groups
from autopar.report.hlo_text import Shape, parse_module

HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8\n"

GPU = (
    HEADER
    + """
%add.clone (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(f32[] %x, f32[] %y)
}

%async_computation (param_0: bf16[64,32]) -> bf16[16,32] {
  %param_0 = bf16[64,32]{1,0} parameter(0)
  ROOT %rs.1 = bf16[16,32]{1,0} reduce-scatter(bf16[64,32]{1,0} %param_0), channel_id=3, \
replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add.clone, metadata={op_name="ap5/rs"}
}

ENTRY %main (a: bf16[64,32], b: f32[16,8]) -> bf16[16,32] {
  %a = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0), sharding={replicated}
  %b = f32[16,8]{1,0} parameter(1)
  %ags = (f32[16,8]{1,0}, f32[16,32]{1,0}) all-gather-start(f32[16,8]{1,0} %b), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true
  %agd = f32[16,32]{1,0} all-gather-done((f32[16,8]{1,0}, f32[16,32]{1,0}) %ags)
  %ars = (f32[16,8]{1,0}, bf16[64,32]{1,0}) all-reduce-start(f32[16,8]{1,0} %b, \
/*index=1*/bf16[64,32]{1,0} %a), channel_id=2, replica_groups={}, to_apply=%add.clone, \
metadata={op_name="(ap1/psum:ap2/psum)"}
  %ard = (f32[16,8]{1,0}, bf16[64,32]{1,0}) all-reduce-done(%ars)
  %g0 = f32[16,8]{1,0} get-tuple-element(%ard), index=0, metadata={op_name="ap1/psum"}
  %g1 = bf16[64,32]{1,0} get-tuple-element(%ard), index=1, metadata={op_name="ap2/psum"}
  %rss = ((bf16[64,32]{1,0}), bf16[16,32]{1,0}) async-start(%g1), calls=%async_computation
  %mm = (f32[16,24]{1,0}, s8[4194304]{0}) custom-call(%b, %c), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"calls=":"x"}}
  %c = f32[24,8]{1,0} constant({...})
  ROOT %rsd = bf16[16,32]{1,0} async-done(%rss), calls=%async_computation
}
"""
)


def test_asynchronous_collectives_read_as_plain_ones() -> None:
    program = read_hlo(GPU)
    assert [(c.kind, c.elements, c.times, c.op_name) for c in program.collectives] == [
        ("reduce-scatter", 64 * 32, 1, "ap5/rs"),
        ("all-gather", 16 * 32, 1, ""),
        ("all-reduce", 16 * 8 + 64 * 32, 1, "(ap1/psum:ap2/psum)"),
    ]
    scatter, gather, reduce = program.collectives
    assert scatter.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert gather.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert reduce.groups == (tuple(range(8)),)
    assert reduce.members == (
        HloMember(128, "f32", "ap1/psum"),
        HloMember(2048, "bf16", "ap2/psum"),
    )
    assert reduce.dtype == "f32+bf16"


def test_library_matmul_counts_by_its_element_counts() -> None:
    assert read_hlo(GPU).dot_flops == 2 * 16 * 24 * 8


@pytest.mark.parametrize(
    ("target", "first", "second", "result"),
    [
        ("Forward", "f32[2,9,9,3]", "f32[3,3,3,5]", "f32[2,7,7,5]"),
        ("BackwardInput", "f32[2,7,7,5]", "f32[3,3,3,5]", "f32[2,9,9,3]"),
        ("BackwardFilter", "f32[2,9,9,3]", "f32[2,7,7,5]", "f32[3,3,3,5]"),
    ],
)
def test_library_convolutions_count_the_same_in_each_direction(
    target: str, first: str, second: str, result: str
) -> None:
    text = f"""{HEADER}
ENTRY main {{
  a = {first}{{3,2,1,0}} parameter(0)
  b = {second}{{3,2,1,0}} parameter(1)
  ROOT r = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(a, b), window={{size=3x3}}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$conv{target}"
}}
"""
    assert read_hlo(text).dot_flops == 2 * (2 * 7 * 7 * 5) * 9 * 3


def test_library_call_of_unknown_size_is_noted() -> None:
    text = f"""{HEADER}
ENTRY main {{
  a = f32[3,5] parameter(0)
  b = f32[7,9] parameter(1)
  ROOT r = f32[3,9] custom-call(a, b), custom_call_target="__cublas$lt$groupedMatmul"
}}
"""
    program = read_hlo(text)
    assert program.dot_flops == 0
    assert program.notes == ("r in main could not be sized",)


@pytest.mark.parametrize(
    "compare",
    [
        "ROOT lt = pred[] compare(i, n), direction=LT",
        "ROOT lt = pred[] fusion(n, i), kind=kLoop, calls=less",
        "ROOT lt = pred[] fusion(n, i), kind=kLoop, calls=less_constant",
    ],
)
def test_trip_count_from_the_condition(compare: str) -> None:
    text = f"""HloModule loops

less {{
  p0 = s32[] parameter(0)
  p1 = s32[] parameter(1)
  ROOT c = pred[] compare(p1, p0), direction=LT
}}

less_constant {{
  p0 = s32[] parameter(0)
  p1 = s32[] parameter(1)
  k = s32[] constant(9)
  ROOT c = pred[] compare(p1, k), direction=LT
}}

cond {{
  t = (f32[4,4], s32[]) parameter(0)
  i = s32[] get-tuple-element(t), index=1
  n = s32[] constant(9)
  {compare}
}}

body {{
  t = (f32[4,4], s32[]) parameter(0)
  m = f32[4,4] get-tuple-element(t), index=0
  i = s32[] get-tuple-element(t), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  mm = f32[4,4] dot(m, m), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT out = (f32[4,4], s32[]) tuple(mm, j)
}}

ENTRY main {{
  m = f32[4,4] parameter(0)
  two = s32[] constant(2)
  start = s32[] copy(two)
  t = (f32[4,4], s32[]) tuple(m, start)
  ROOT w = (f32[4,4], s32[]) while(t), condition=cond, body=body
}}
"""
    program = read_hlo(text)
    assert program.dot_flops == 7 * 2 * 4**3
    assert program.notes == ("the trip count of w in main is 7 if its counter moves in steps of 1",)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0}, {1}}", ((0,), (1,))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,0,1) {'b'}", ((3, 2), (0, 1))),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
    ],
)
def test_replica_group_forms(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    attributes = f", channel_id=1, replica_groups={text}, use_global_device_ids=true"
    assert parse_groups(attributes, 4) == groups


def test_replica_groups_of_an_unknown_form_are_an_error() -> None:
    with pytest.raises(AuditError, match="replica groups") as error:
        parse_groups(", replica_groups=torus(3), channel_id=1", 4)
    assert "torus(3)" in str(error.value)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("c",)),
        (((2, 0), (1, 3), (4, 6), (5, 7)), ("b",)),
        (((0, 4), (1, 5), (2, 6), (3, 7)), ("a",)),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("b", "c")),
        (((0, 2, 4, 6), (1, 3, 5, 7)), ("a", "b")),
        ((tuple(range(8)),), ("a", "b", "c")),
        (tuple((i,) for i in range(8)), ()),
        (((0, 3), (1, 2), (4, 7), (5, 6)), None),
        (((0, 1), (2, 3)), None),
    ],
)
def test_axes_of_groups(groups: tuple[tuple[int, ...], ...], axes: tuple[str, ...] | None) -> None:
    # the axis of size 1 in the middle is spanned by every group, and named by none
    assert axes_of_groups(groups, ("a", "one", "b", "c"), (2, 1, 2, 2)) == axes


def test_axes_of_pairs() -> None:
    assert axes_of_pairs(((0, 1), (2, 3)), ("a", "b"), (2, 2)) == ("b",)
    assert axes_of_pairs(((0, 3),), ("a", "b"), (2, 2)) == ("a", "b")
    assert axes_of_pairs(((1, 1),), ("a", "b"), (2, 2)) == ()
    assert axes_of_pairs(((0, 4),), ("a", "b"), (2, 2)) is None


def test_lines_with_awkward_text() -> None:
    text = """HloModule m, entry_computation_layout={(f32[2]{0}, /*index=1*/f32[2]{0})->f32[]}

FileNames
1 "/tmp/body=%x {"

ENTRY %main.1_spmd (p: (f32[2], /*index=1*/s32[])) -> f32[2] {
  %p = (f32[2]{0:T(256)}, s32[]) parameter(0), metadata={op_name="a (b) \\"calls=%no\\""}
  %k = s32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })
  ROOT %get.1 = f32[2]{0} get-tuple-element((f32[2], s32[]) %p), index=0
}, execution_thread="main"
"""
    module = parse_module(text)
    main = module.computations[module.entry]
    assert (module.entry, main.root, module.devices) == ("main.1_spmd", "get.1", 1)
    assert main.instructions["p"].shapes == (Shape("f32", (2,)), Shape("s32", ()))
    assert main.instructions["p"].callees() == ()
    assert main.instructions["p"].op_name == 'a (b) \\"calls=%no\\"'
    assert main.instructions["get.1"].operands == ("p",)


@pytest.mark.parametrize("text", ["", "HloModule empty\n", "module @jit_f { }"])
def test_text_without_a_program_is_an_error(text: str) -> None:
    with pytest.raises(AuditError, match="no entry computation"):
        read_hlo(text)
