"""The caches: what is in them after any sequence of calls, and what a wrong call says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashtile.kvcache import ContiguousCache, OutOfPagesError, PagedCache

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
HEADS, DIM, DIM_V = 2, 3, 2


def tokens(*numbers, dtype=torch.float64, device="cpu"):
    """k (S, Hk, D) and v (S, Hk, Dv) of tokens that are told apart by their number in every element."""
    column = torch.tensor(numbers, dtype=torch.float64, device=device).view(-1, 1, 1)
    k = column + torch.arange(HEADS * DIM, device=device).view(HEADS, DIM) / 8
    v = -column - torch.arange(HEADS * DIM_V, device=device).view(HEADS, DIM_V) / 8
    return k.to(dtype), v.to(dtype)


def batch_of(*rows, **options):
    """k (B, S, Hk, D) and v (B, S, Hk, Dv) of rows of token numbers."""
    ks, vs = zip(*(tokens(*row, **options) for row in rows), strict=True)
    return torch.stack(ks), torch.stack(vs)


def paged(num_pages=4, page_size=4, dtype=torch.float64, device="cpu"):
    return PagedCache(num_pages, page_size, HEADS, DIM, DIM_V, dtype=dtype, device=device)


def contiguous(batch=3, capacity=4, dtype=torch.float64, device="cpu"):
    return ContiguousCache(batch, capacity, HEADS, DIM, DIM_V, dtype=dtype, device=device)


def slots(cache, sequence, first, end):
    """Pages and offsets of positions first to end - 1, found as a kernel finds them."""
    positions = torch.arange(first, end, device=cache.k.device)
    page_size = cache.k.shape[1]
    return cache.block_table([sequence])[0][positions // page_size].long(), positions % page_size


def gathered(cache, sequence):
    """k and v of a sequence, read through block_table and cache_seqlens."""
    index = slots(cache, sequence, 0, cache.cache_seqlens([sequence]).item())
    return cache.k[index], cache.v[index]


def write(cache, sequence, *numbers):
    """What flash_attn_with_kvcache does with k and v: writes behind cache_seqlens, through block_table."""
    length = cache.cache_seqlens([sequence]).item()
    index = slots(cache, sequence, length, length + len(numbers))
    cache.k[index], cache.v[index] = tokens(*numbers, dtype=cache.k.dtype, device=cache.k.device)


def everything(cache):
    """All that a failed call must leave as it was."""
    entries = {handle: (list(s.pages), s.length, s.end) for handle, s in cache._sequences.items()}
    return cache.k.tolist(), cache.v.tolist(), list(cache._free), list(cache._references), entries, cache._next


class PagedAgainstLists(RuleBasedStateMachine):
    """Each sequence beside a list of its tokens' numbers, and a list of those written but not advanced over."""

    handles = st.runner().flatmap(lambda machine: st.sampled_from(sorted(machine.model)))

    def __init__(self):
        super().__init__()
        self.model = {}  # handle -> numbers of its tokens
        self.ahead = {}  # handle -> numbers written to reserved room
        self.ends = {}  # handle -> one past the last position it may write
        self.freed = []
        self.written = 0

    @initialize(num_pages=st.integers(1, 7), page_size=st.sampled_from([1, 2, 4, 8]))
    def open(self, num_pages, page_size):
        self.cache = paged(num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size

    def numbers(self, n):
        self.written += n
        return list(range(self.written - n, self.written))

    def pages_for(self, count):
        return -(-count // self.page_size)

    def table(self, handle):
        """The pages of one sequence; their number is the model's, and unused entries are zero."""
        count = self.pages_for(self.ends[handle])
        row = self.cache.block_table([handle])[0].tolist()
        assert len(row) == max(1, count)
        assert not any(row[count:])
        return row[:count]

    def fits(self, handle, n, call):
        """Whether `call`, which needs room for n tokens, found it; where it did not, nothing has changed."""
        before = everything(self.cache)
        end, held = len(self.model[handle]) + n, self.pages_for(self.ends[handle])
        wanted, free = self.pages_for(end) - held, self.cache.free_pages
        try:
            call()
        except OutOfPagesError:
            assert everything(self.cache) == before
            assert wanted + 1 > free  # the one more is a copy of a shared last page
            return False
        assert wanted <= free
        self.ends[handle] = max(self.ends[handle], end)
        return True

    @rule()
    def new(self):
        handle = self.cache.new()
        assert handle not in self.model
        self.model[handle], self.ahead[handle], self.ends[handle] = [], [], 0

    @precondition(lambda self: self.model)
    @rule(handle=handles, n=st.integers(0, 9))
    def append(self, handle, n):
        numbers = self.numbers(n)
        if self.fits(handle, n, lambda: self.cache.append(handle, *tokens(*numbers))):
            self.model[handle] += numbers
            self.ahead[handle] = self.ahead[handle][n:]

    @precondition(lambda self: self.model)
    @rule(handle=handles, n=st.integers(0, 9))
    def reserve(self, handle, n):
        self.fits(handle, n, lambda: self.cache.reserve(handle, n))

    @precondition(lambda self: self.model)
    @rule(handle=handles, data=st.data())
    def write(self, handle, data):
        n = data.draw(st.integers(0, self.ends[handle] - len(self.model[handle])))
        numbers = self.numbers(n)
        write(self.cache, handle, *numbers)
        self.ahead[handle] = numbers + self.ahead[handle][n:]

    @precondition(lambda self: self.model)
    @rule(handle=handles, data=st.data())
    def advance(self, handle, data):
        n = data.draw(st.integers(0, len(self.ahead[handle])))
        self.cache.advance(handle, n)
        self.model[handle] += self.ahead[handle][:n]
        self.ahead[handle] = self.ahead[handle][n:]

    @precondition(lambda self: self.model)
    @rule(handle=handles, more=st.integers(1, 3))
    def advance_past_the_room(self, handle, more):
        before = everything(self.cache)
        with pytest.raises(ValueError, match=f"reserved for sequence {handle}"):
            self.cache.advance(handle, self.ends[handle] - len(self.model[handle]) + more)
        assert everything(self.cache) == before

    @precondition(lambda self: self.model)
    @rule(handle=handles)
    def fork(self, handle):
        free = self.cache.free_pages
        child = self.cache.fork(handle)
        assert self.cache.free_pages == free
        assert child not in self.model
        self.model[child], self.ahead[child] = list(self.model[handle]), []
        self.ends[child] = len(self.model[handle])

    @precondition(lambda self: self.model)
    @rule(handle=handles)
    def free(self, handle):
        self.cache.free(handle)
        del self.model[handle], self.ahead[handle], self.ends[handle]
        self.freed.append(handle)

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def use_a_freed_handle(self, data):
        handle = data.draw(st.sampled_from(self.freed))
        with pytest.raises(ValueError, match=f"got {handle}, which was freed"):
            self.cache.reserve(handle, 1)

    @invariant()
    def every_sequence_has_its_tokens(self):
        for handle, numbers in self.model.items():
            assert self.cache.length(handle) == len(numbers)
            torch.testing.assert_close(gathered(self.cache, handle), tokens(*numbers), rtol=0, atol=0)

    @invariant()
    def every_page_is_free_or_counted_once_for_each_owner(self):
        owners = [page for handle in self.model for page in self.table(handle)]
        assert self.cache._references == [owners.count(page) for page in range(self.num_pages)]
        assert sorted({*owners, *self.cache._free}) == list(range(self.num_pages))
        assert len(set(owners)) + self.cache.free_pages == self.num_pages

    @invariant()
    def positions_that_one_may_write_are_no_other_sequence_s_tokens(self):
        writable, read = [], set()
        for handle, numbers in self.model.items():
            places = [(page, offset) for page in self.table(handle) for offset in range(self.page_size)]
            read.update(places[: len(numbers)])
            writable += places[len(numbers) : self.ends[handle]]
        assert len(set(writable)) == len(writable)
        assert not read.intersection(writable)


PagedAgainstLists.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPagedAgainstLists = PagedAgainstLists.TestCase


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_block_table_and_cache_seqlens_are_what_flash_attn_reads(dtype, page_size, device):
    cache = paged(24, page_size, dtype, device)
    short, empty, long = cache.new(), cache.new(), cache.new()
    options = {"dtype": dtype, "device": device}
    cache.append(short, *tokens(1, 2, 3, **options))
    cache.append(long, *tokens(*range(4, 21), **options))
    sequences = [long, empty, short]
    block_table, cache_seqlens = cache.block_table(sequences), cache.cache_seqlens(sequences)
    for tensor, shape in ((block_table, (3, -(-17 // page_size))), (cache_seqlens, (3,))):
        assert (tensor.shape, tensor.dtype, tensor.device) == (shape, torch.int32, cache.k.device)
        assert tensor.is_contiguous()
    assert cache_seqlens.tolist() == [17, 0, 3]
    assert not block_table[1].any()
    assert not block_table[2, -(-3 // page_size) :].any()
    for row, numbers in ((0, range(4, 21)), (2, range(1, 4))):
        k = cache.k[block_table[row].long()].flatten(0, 1)[: len(numbers)]
        v = cache.v[block_table[row].long()].flatten(0, 1)[: len(numbers)]
        expected = tokens(*numbers, **options)
        assert torch.equal(k.double(), expected[0].double())
        assert torch.equal(v.double(), expected[1].double())


def test_a_table_has_a_column_even_when_nobody_has_a_page():
    cache = paged()
    assert cache.block_table([cache.new()]).tolist() == [[0]]
    assert cache.block_table([]).shape == (0, 1)
    assert cache.cache_seqlens([]).shape == (0,)


def test_a_fork_shares_pages_until_it_writes():
    cache = paged(num_pages=6, page_size=4)
    parent = cache.new()
    cache.append(parent, *tokens(*range(10)))
    child = cache.fork(parent)
    assert cache.block_table([parent]).equal(cache.block_table([child]))
    assert cache.free_pages == 3
    cache.append(child, *tokens(100))
    (*prefix, last), (*child_prefix, child_last) = cache.block_table([parent, child]).tolist()
    assert prefix == child_prefix
    assert last != child_last
    assert cache.free_pages == 2
    cache.append(parent, *tokens(200))  # the page is its own again: no second copy
    assert cache.block_table([parent])[0, -1] == last
    assert gathered(cache, child)[0].equal(tokens(*range(10), 100)[0])
    assert gathered(cache, parent)[0].equal(tokens(*range(10), 200)[0])
    cache.free(parent)
    assert gathered(cache, child)[0].equal(tokens(*range(10), 100)[0])
    cache.free(child)
    assert cache.free_pages == 6


def test_a_fork_goes_on_sharing_a_full_last_page():
    cache = paged(num_pages=4, page_size=4)
    parent = cache.new()
    cache.append(parent, *tokens(*range(8)))
    child = cache.fork(parent)
    cache.append(child, *tokens(8))
    assert cache.block_table([child])[:, :2].equal(cache.block_table([parent]))
    assert cache.free_pages == 1


def test_room_reserved_before_a_fork_may_be_written_after_it():
    cache = paged()
    parent = cache.new()
    cache.append(parent, *tokens(1, 2))
    cache.reserve(parent, 2)
    child = cache.fork(parent)
    with pytest.raises(ValueError, match="want at most 0, the tokens reserved for sequence 1"):
        cache.advance(child, 1)
    cache.append(child, *tokens(50))
    write(cache, parent, 3, 4)
    cache.advance(parent, 2)
    assert gathered(cache, parent)[0].equal(tokens(1, 2, 3, 4)[0])
    assert gathered(cache, child)[0].equal(tokens(1, 2, 50)[0])


def test_a_rejected_draft_is_written_over():
    cache = paged()
    sequence = cache.new()
    cache.append(sequence, *tokens(1, 2))
    cache.reserve(sequence, 4)
    write(cache, sequence, 3, 4, 5, 6)
    cache.advance(sequence, 1)
    cache.append(sequence, *tokens(7))
    assert gathered(cache, sequence)[0].equal(tokens(1, 2, 3, 7)[0])


def test_out_of_pages_says_how_many_and_changes_nothing():
    cache = paged(num_pages=4, page_size=4)
    parent, other = cache.new(), cache.new()
    cache.append(parent, *tokens(*range(6)))
    cache.append(other, *tokens(1))
    child = cache.fork(parent)
    before = everything(cache)
    # one page for tokens 8 to 10, and one for the copy of the shared page
    for call in (lambda: cache.append(child, *tokens(*range(5))), lambda: cache.reserve(child, 5)):
        with pytest.raises(OutOfPagesError, match="out of pages: 2 wanted, 1 free, 4 in the pool"):
            call()
        assert everything(cache) == before
    assert issubclass(OutOfPagesError, RuntimeError)
    cache.free(other)
    cache.append(child, *tokens(*range(5)))
    assert gathered(cache, child)[0].equal(tokens(*range(6), *range(5))[0])


def test_layers_can_share_one_page_table():
    layers, cache = 3, PagedCache(4, 2, 3 * HEADS, DIM, DIM_V, dtype=torch.float64, device="cpu")
    sequence = cache.new()
    parts = [tokens(*range(layer, layer + 3)) for layer in range(layers)]
    cache.append(sequence, torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1))
    index = slots(cache, sequence, 0, 3)
    for layer, (k, v) in enumerate(parts):
        assert cache.k.unflatten(2, (layers, HEADS))[:, :, layer][index].equal(k)
        assert cache.v.unflatten(2, (layers, HEADS))[:, :, layer][index].equal(v)


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contiguous_rows_grow_alone_and_together(dtype, device):
    cache, options = contiguous(dtype=dtype, device=device), {"dtype": dtype, "device": device}
    cache.append(*batch_of([1], [2], [3], **options))
    cache.append(*batch_of([31, 32], [11, 12], **options), cache_batch_idx=[2, 0])
    rows = torch.tensor([1], dtype=torch.int32, device=device)
    cache.append(*batch_of([21], **options), cache_batch_idx=rows)
    assert (cache.seqlens.tolist(), cache.seqlens.dtype) == ([3, 2, 3], torch.int32)
    assert cache.seqlens.device == cache.k.device
    for row, numbers in enumerate(([1, 11, 12], [2, 21], [3, 31, 32])):
        k, v = tokens(*numbers, **options)
        assert torch.equal(cache.k[row, : len(numbers)].double(), k.double())
        assert torch.equal(cache.v[row, : len(numbers)].double(), v.double())
        assert not cache.k[row, len(numbers) :].double().any()
    cache.reset([0, 2])
    assert cache.seqlens.tolist() == [0, 2, 0]
    cache.append(*batch_of([5], [6], [7], **options))
    assert torch.equal(cache.k[:, 0].double(), batch_of([5], [2], [7], **options)[0][:, 0].double())
    cache.reset()
    assert not cache.seqlens.any()


def test_contiguous_lengths_may_be_advanced_by_the_caller():
    cache = contiguous()
    cache.k[:, 0], cache.v[:, 0] = (x[:, 0] for x in batch_of([1], [2], [3]))
    cache.seqlens += 1
    cache.append(*batch_of([4], [5], [6]))
    assert cache.k[:, :2].equal(batch_of([1, 4], [2, 5], [3, 6])[0])


def test_the_head_dim_of_v_is_that_of_k_unless_it_is_given():
    assert PagedCache(2, 4, 1, 8, dtype=torch.float32, device="cpu").v.shape == (2, 4, 1, 8)
    assert ContiguousCache(2, 5, 1, 8, dtype=torch.float32, device="cpu").v.shape == (2, 5, 1, 8)
    assert contiguous().v.shape == (3, 4, HEADS, DIM_V)


def test_tokens_that_need_gradients_are_stored_without_them():
    k, v = (x.requires_grad_() for x in tokens(1))
    cache, rows = paged(), contiguous(batch=1)
    cache.append(cache.new(), k, v)
    rows.append(k[None], v[None])
    assert not any(x.requires_grad for x in (cache.k, cache.v, rows.k, rows.v))


FLOAT = {"dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PagedCache(0, 4, 1, 8, **FLOAT), ValueError, "num_pages: got 0; want an int >= 1"),
        (lambda: PagedCache(4, 3, 1, 8, **FLOAT), ValueError, "page_size: got 3; want a power of two"),
        (lambda: PagedCache(4, 0, 1, 8, **FLOAT), ValueError, "page_size: got 0; want an int >= 1"),
        (lambda: PagedCache(4, 4.0, 1, 8, **FLOAT), TypeError, "page_size: got 4.0; want an int"),
        (lambda: PagedCache(4, 4, 0, 8, **FLOAT), ValueError, "heads_k: got 0"),
        (lambda: PagedCache(4, 4, 1, True, **FLOAT), TypeError, "head_dim: got True; want an int"),
        (lambda: PagedCache(4, 4, 1, 8, 0, **FLOAT), ValueError, "head_dim_v: got 0"),
        (lambda: paged(dtype=torch.int8), TypeError, "dtype: got torch.int8; want a floating-point dtype"),
        (lambda: paged(dtype="float32"), TypeError, "dtype: got float32"),
        (lambda: ContiguousCache(0, 4, 1, 8, **FLOAT), ValueError, "batch: got 0"),
        (lambda: ContiguousCache(1, -4, 1, 8, **FLOAT), ValueError, "capacity: got -4"),
        (lambda: contiguous(dtype=torch.int32), TypeError, "dtype: got torch.int32"),
    ],
)
def test_a_cache_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


K, V = tokens(1, 2)


@pytest.mark.parametrize(
    ("k", "v", "error", "message"),
    [
        ([1.0], V, TypeError, "k: got list; want a torch.Tensor"),
        (K, None, TypeError, "v: got NoneType; want a torch.Tensor"),
        (K.float(), V, TypeError, "k: got torch.float32; want the dtype of the cache, torch.float64"),
        (K.to("meta"), V, ValueError, "k: is on meta; want the device of the cache, cpu"),
        (K, V[:, 0], ValueError, "v: got shape .*; want . dimensions .*seqlen, heads, head_dim"),
        (K[:, :1], V, ValueError, "k: got 1 heads; want the heads of the cache, 2"),
        (K, V[:, :0], ValueError, "v: got 0 heads; want the heads of the cache, 2"),
        (V, V, ValueError, "k: got head_dim 2; want the head_dim of the cache's k, 3"),
        (K, K, ValueError, "v: got head_dim 3; want the head_dim of the cache's v, 2"),
        (K, V[:1], ValueError, "v: got seqlen 1; want the seqlen of k, 2"),
    ],
)
def test_tokens_that_do_not_fit_the_cache(k, v, error, message):
    cache = paged()
    sequence = cache.new()
    before = everything(cache)
    with pytest.raises(error, match=message):
        cache.append(sequence, k, v)
    assert everything(cache) == before
    rows = contiguous(batch=1)
    with pytest.raises(error, match=message):
        rows.append(*(x[None] if isinstance(x, torch.Tensor) else x for x in (k, v)))
    assert not any(x.any() for x in (rows.k, rows.v, rows.seqlens))


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, handle: cache.append(handle, K, V),
        lambda cache, handle: cache.reserve(handle, 1),
        lambda cache, handle: cache.advance(handle, 0),
        lambda cache, handle: cache.fork(handle),
        lambda cache, handle: cache.free(handle),
        lambda cache, handle: cache.length(handle),
        lambda cache, handle: cache.block_table([handle]),
        lambda cache, handle: cache.cache_seqlens([handle]),
    ],
)
def test_a_handle_that_names_no_sequence(call):
    cache = paged()
    freed = cache.new()
    cache.free(freed)
    with pytest.raises(ValueError, match="sequence: got 0, which was freed; want a handle from new"):
        call(cache, freed)
    with pytest.raises(ValueError, match="sequence: got 7; want a handle from new"):
        call(cache, 7)


@pytest.mark.parametrize(("n", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)])
def test_a_number_of_tokens_that_is_none(n, error):
    cache = paged()
    sequence = cache.new()
    for call in (cache.reserve, cache.advance):
        with pytest.raises(error, match=f"n: got {n}"):
            call(sequence, n)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3], "cache_batch_idx: got 3; want rows 0 to 2"),
        ([-1], "cache_batch_idx: got -1; want rows 0 to 2"),
        ([0.0], "cache_batch_idx: got 0.0; want rows"),
        ([1, 1], "cache_batch_idx: got .1, 1.; want each row once"),
        (torch.tensor([[1]]), "cache_batch_idx: got shape .1, 1.; want 1 dimension"),
    ],
)
def test_rows_that_are_not_there(rows, message):
    cache = contiguous()
    for call in (lambda: cache.append(*batch_of([1]), cache_batch_idx=rows), lambda: cache.reset(rows)):
        with pytest.raises(ValueError, match=message):
            call()
    assert not cache.k.any()


def test_contiguous_tokens_past_the_capacity_change_nothing():
    cache = contiguous(capacity=4)
    cache.append(*batch_of([1, 2, 3]), cache_batch_idx=[1])
    k = cache.k.clone()
    with pytest.raises(ValueError, match="k: got 2 tokens for row 1, which holds 3 of 4; want at most 1"):
        cache.append(*batch_of([4, 5], [6, 7], [8, 9]))
    with pytest.raises(ValueError, match="k: got batch 2; want 3, one for each row written"):
        cache.append(*batch_of([4], [5]))
    assert cache.k.equal(k)
    assert cache.seqlens.tolist() == [0, 3, 0]
