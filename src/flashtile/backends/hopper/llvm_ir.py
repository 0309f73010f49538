"""What is changed in the LLVM IR of a Hopper kernel before PTX is made of it, as text: its roles call a function in one
place, of which there is then one copy in the machine code, whatever the number of warpgroups; and where a warpgroup
arrives at an mbarrier, its warps need not meet.

As Triton leaves it, each role has a call of its own, and with the function inlined as many copies of it: two or three
times the work for LLVM and ptxas, and the instruction cache.
"""

from __future__ import annotations

import re

_CALL = re.compile(r'(?m)^  (?:tail )?call fastcc void (@"[^"]*")\((.*)\)(?: #\d+)?$')
_FUNCTION = re.compile(r'(?ms)^define internal fastcc void (@"[^"]*")\((.*?)\) [^\n()]*\{\n.*?^}$')
_KERNEL = re.compile(r"(?ms)^define (?!internal)[^\n]*\{\n.*?^}$")
_ARRIVAL = re.compile(
    r"(?m)^  (?:tail )?call void @llvm\.nvvm\.barrier\..*\n"
    r'((?:  %\S+ = and i1 .*\n)?.* asm sideeffect "@\$0 mbarrier\.arrive\.shared\S* _, \[\$1\], 4;", "b,r"\(i1 .*)$'
)
_PROMISE = r" (?:no\w+|readnone|readonly|writeonly|captures\(\w+\)|align \d+|range\(\w+ -?\d+, -?\d+\))"


def for_roles(source: str) -> str:
    """A module whose kernel's roles call functions that are not inlined yet, to be inlined now."""
    parameters = {name: items(text) for name, text in _FUNCTION.findall(source)}
    source = _KERNEL.sub(lambda kernel: called_once(kernel[0], parameters), source)
    source = _FUNCTION.sub(lambda function: of_a_warpgroup(arriving_by_warp(function[0])), source)
    return re.sub(r"(?m)^(attributes #\d+ = \{.*)\bnoinline\b", r"\1alwaysinline", source)


def arriving_by_warp(function: str) -> str:
    """A function in which a warpgroup meets before its first thread arrives at an mbarrier for four warps: each of them
    arrives for itself now, and only its own threads meet. What a warpgroup's product reads must not be written before
    all of its warps say so: one has been seen to end for a warp while another was yet to issue it. What warps leave for
    each other in shared memory has barriers of its own, which tests/test_aot.py sees to. A function in which the first
    thread is not known as such stays as it is."""

    def named(definition: str) -> str:
        found = re.search(rf"(?m)^  (%\d+) = {definition}$", function)
        return found[1] if found else "none"

    thread = named(rf"and i32 {named('.*@llvm.nvvm.read.ptx.sreg.tid.x.*')}, 127")
    first = named(f"icmp eq i32 {thread}, 0")
    if not all(re.search(rf"{first}\b", arrival[1]) for arrival in _ARRIVAL.finditer(function)):
        return function

    def by_warp(arrival: re.Match[str]) -> str:
        text = re.sub(rf"{first}\b", "%first", arrival[1])
        return text.replace('"@$0', '"bar.warp.sync -1; @$0').replace("[$1], 4;", "[$1];")

    test = f"  {first} = icmp eq i32 {thread}, 0\n"
    added = f"  %lane = and i32 {thread}, 31\n  %first = icmp eq i32 %lane, 0\n"
    return _ARRIVAL.sub(by_warp, function).replace(test, test + added)


def of_a_warpgroup(function: str) -> str:
    """A function whose first argument is the number of a warpgroup: threads are that warpgroup's, and so are those that
    meet at a barrier. By 3.6 and 3.7 they are the program's, where they ought to be a role's."""
    everyone = "@llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)"
    if everyone not in function:
        return function
    head, body = function.split("{\n", 1)
    body = body.replace(everyone, "@llvm.nvvm.barrier.cta.sync.aligned.count(i32 %barrier, i32 128)")
    body = re.sub(
        r"(?m)^  %(\d+) = (.*@llvm\.nvvm\.read\.ptx\.sreg\.tid\.x.*)$",
        r"  %thread\1 = \2\n  %\1 = and i32 %thread\1, 127",
        body,
    )
    # of the first role Triton's barrier is 0, of those after it 2 and so on: with 1 all roles begin and end
    first = "  %later = icmp ne i32 %0, 0\n  %skipped = zext i1 %later to i32\n  %barrier = add i32 %0, %skipped\n"
    return head + "{\n" + first + body


def called_once(kernel: str, parameters: dict[str, list[str]]) -> str:
    """A kernel that calls a function at the end of some blocks' first half: each goes to one block that does, with the
    arguments of the one it came from, and from there to its own second half."""
    calls = list(_CALL.finditer(kernel))
    if len({call[1] for call in calls}) != 1 or len(calls) == 1:
        return kernel
    name = calls[0][1]
    kinds = [re.sub(_PROMISE, "", parameter.rsplit(" ", 1)[0]) for parameter in parameters[name]]
    blocks = [re.findall(r"(?m)^([\w.$-]+):", kernel[: call.start()])[-1] for call in calls]
    phis, arguments = [], []
    for i, (kind, *given) in enumerate(zip(kinds, *(items(call[2]) for call in calls), strict=True)):
        values = [re.sub(rf"^(?:{_PROMISE})+ ", " ", argument[len(kind) :]).strip() for argument in given]
        if len(set(values)) > 1:
            phis.append(phi(f"%argument{i}", kind, values, blocks))
            values = [f"%argument{i}"]
        arguments.append(f"{kind} {values[0]}")
    roles = [str(role) for role in range(len(calls))]
    phis.append(phi("%role", "i32", roles, blocks))
    for role, block in zip(roles, blocks, strict=True):  # what comes after a call is a block of its own now
        kernel = re.sub(rf"(?m)^(  \S+ = phi .*), %{re.escape(block)} \]", rf"\1, %behind{role} ]", kernel)
    number = iter(roles)
    kernel = _CALL.sub(lambda _: f"  br label %calling\n\nbehind{next(number)}:", kernel)
    others = "\n".join(f"    i32 {role}, label %behind{role}" for role in roles[1:])
    calling = (
        f"  call fastcc void {name}({', '.join(arguments)})\n  switch i32 %role, label %behind0 [\n{others}\n  ]\n"
    )
    return kernel.removesuffix("}") + "\ncalling:\n" + "\n".join(phis) + "\n" + calling + "}"


def phi(name: str, kind: str, values: list[str], blocks: list[str]) -> str:
    """The value that belongs to the block it comes from."""
    return f"  {name} = phi {kind} " + ", ".join(f"[ {v}, %{b} ]" for v, b in zip(values, blocks, strict=True))


def items(text: str) -> list[str]:
    """What commas separate outside brackets."""
    found, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "({[<") - (letter in ")}]>")
        if letter == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, text[start:].strip()]
