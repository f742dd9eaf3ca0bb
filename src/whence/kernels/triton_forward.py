"""The forward kernel: one pass over the keys, the bias looked up near the diagonal alone."""

import triton
import triton.language as tl

from whence.kernels.triton_tile import (
    LOG2E,
    far_line,
    kept,
    load_part,
    load_rows,
    load_tails,
    near_bias,
    near_range,
    skewed,
    visible,
    whole_blocks,
    within,
)


@triton.jit
def attended_range(
    acc,
    top,
    total,
    left_mass,
    right_mass,
    q,
    k_ptr,
    v_ptr,
    band_ptr,
    left,
    left_slope,
    right,
    right_slope,
    keys_ptr,
    q_segment,
    k_segment_ptr,
    mass_ptr,
    seed,
    rows,
    r,
    first,  # the position of the first row
    start,
    stop,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    value_reach,
    before,
    after,
    scale2,
    dropout,
    stride_k_n,
    stride_v_n,
    stride_band_q,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REGION: tl.constexpr,  # 0 far left, 1 near, 2 far right
    BAND: tl.constexpr,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROW_TAILS: tl.constexpr,  # tails differ from row to row, be it that rows are of several heads
    VALUES: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr,
    DROPOUT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over keys start..stop; *_mass is the mass beyond the value table."""
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    c = tl.arange(0, BLOCK_N)
    there = rows < n_q
    LAID_OUT: tl.constexpr = BAND and REGION == 1 and not PER_ROW  # the window is in the band
    LEFT_EDGE: tl.constexpr = BEFORE and REGION < 2 and not LAID_OUT
    RIGHT_EDGE: tl.constexpr = AFTER and REGION > 0 and not LAID_OUT
    MASKED: tl.constexpr = KEYS or SEGMENTS or LEFT_EDGE or RIGHT_EDGE or not EVEN_N
    LINE: tl.constexpr = TAILS and REGION != 1
    for block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        cols = block + c
        k = load_rows(k_ptr, block, c[None, :], d[:, None], stride_k_n, n_k, D, BLOCK_D, EVEN_N)
        logits = tl.dot(q, k, input_precision=PRECISION) * scale2
        shift = 0.0
        if BAND and REGION == 1:
            logits += near_bias(
                band_ptr,
                first,
                block,
                r[:, None],
                c[None, :],
                there[:, None],
                reach,
                edge,
                stride_band_q,
                left_slope[:, None] if SLOPES and ROW_TAILS else left_slope,
                right_slope[:, None] if SLOPES and ROW_TAILS else right_slope,
                SLOPES,
                PER_ROW,
            )
        if LINE:
            shift, tilt = far_line(
                left, left_slope, right, right_slope, first - block, r, REGION, SLOPES
            )
            if SLOPES and ROW_TAILS:
                logits += tilt[:, None] * c.to(tl.float32)[None, :]
            elif SLOPES:
                logits += (tilt * c.to(tl.float32))[None, :]
        if MASKED:
            seen = visible(
                rows[:, None],
                cols[None, :],
                n_k,
                q_start,
                before,
                after,
                keys_ptr,
                q_segment[:, None],
                k_segment_ptr,
                LEFT_EDGE,
                RIGHT_EDGE,
                KEYS,
                SEGMENTS,
            )
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1) + shift)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - (base - shift)[:, None])
        shrink = tl.exp2(top - base)
        mass = tl.sum(weights, 1)
        total = total * shrink + mass
        top = higher
        if DROPOUT:
            weights = weights * kept(seed, rows[:, None], cols[None, :], dropout)
            if VALUES and REGION != 1:
                mass = tl.sum(weights, 1)
        if VALUES:
            left_mass = left_mass * shrink
            right_mass = right_mass * shrink
            if REGION == 0:
                left_mass += mass
            if REGION == 2:
                right_mass += mass
            if REGION == 1:
                lag = cols[None, :] - (rows[:, None] + q_start)
                left_mass += tl.sum(tl.where(lag < -value_reach, weights, 0.0), 1)
                right_mass += tl.sum(tl.where(lag > value_reach, weights, 0.0), 1)
                inside = within(lag, value_reach) & there[:, None]
                if DROPOUT:
                    logits = tl.where(weights > 0.0, logits, float("-inf"))
                zero = block - first + value_reach
                place = skewed(mass_ptr, zero, r[:, None], c[None, :], 2 * value_reach + 1)
                tl.store(place, logits, mask=inside & (cols < n_k)[None, :])
        v = load_rows(
            v_ptr, block, c[:, None], d_v[None, :], stride_v_n, n_k, D_V, BLOCK_DV, EVEN_N
        )
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total, left_mass, right_mass


@triton.jit
def _with_table(
    out,
    mass_ptr,
    table_ptr,
    lse,
    left_mass,
    right_mass,
    r,
    there,
    first,
    low,
    high,
    value_reach,
    dropout,
    D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out + mass @ table. The near tiles left their logits at mass_ptr: they become the masses."""
    width = 2 * value_reach + 1
    d_v = tl.arange(0, BLOCK_DV)
    tl.debug_barrier()  # other threads of this block wrote what is read here
    for start in tl.range(0, width, 32, num_stages=1):
        lag = start + tl.arange(0, 32)
        col = first + r[:, None] + (lag - value_reach)[None, :]
        cells = mass_ptr + r[:, None] * width + lag[None, :]
        inside = there[:, None] & (lag < width)[None, :]
        logits = tl.load(cells, mask=inside & (col >= low) & (col < high), other=float("-inf"))
        mass = tl.exp2(logits - lse[:, None]) / (1.0 - dropout)
        mass += tl.where((lag == 0)[None, :], left_mass[:, None], 0.0)
        mass += tl.where((lag == width - 1)[None, :], right_mass[:, None], 0.0)
        tl.store(cells, mass, mask=inside)
        table = tl.load(
            table_ptr + lag[:, None] * D_V + d_v[None, :],
            mask=(lag < width)[:, None] & (d_v < D_V)[None, :],
            other=0.0,
        )
        out = tl.dot(mass, table, out, input_precision=EXACT)
    return out


@triton.jit
def far_state(
    far_left_ptr,
    far_left_lse_ptr,
    far_right_ptr,
    far_right_lse_ptr,
    bh,
    rows,
    n_q,
    far_start,
    d_v,
    left,
    right,
    D_V: tl.constexpr,
    CAUSAL: tl.constexpr,  # there is nothing far to the right
):
    """What others computed for the far keys of these rows: output and log-sum-exp of both sides.

    Left: row i is row i - far_start of what was computed; right: all was computed in reverse.
    """
    m = n_q - far_start
    index = rows - far_start
    out_left = load_part(far_left_ptr, bh * m, index, m, d_v, D_V).to(tl.float32)
    lse_left = tl.load(
        far_left_lse_ptr + bh * m + index, mask=(index >= 0) & (index < m), other=float("-inf")
    )
    lse_left = lse_left * LOG2E + left
    out_right = out_left * 0.0
    lse_right = tl.full(lse_left.shape, float("-inf"), dtype=tl.float32)
    if not CAUSAL:
        index = m - 1 - rows
        out_right = load_part(far_right_ptr, bh * m, index, m, d_v, D_V).to(tl.float32)
        lse_right = tl.load(
            far_right_lse_ptr + bh * m + index, mask=(index >= 0) & (index < m), other=float("-inf")
        )
        lse_right = lse_right * LOG2E + right
    return out_left, lse_left, out_right, lse_right


@triton.jit(
    do_not_specialize=[
        "q_start",
        "before",
        "after",
        "n_q",
        "n_k",
        "reach",
        "edge",
        "value_reach",
        "far_start",
    ]
)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    band_ptr,
    extent_ptr,
    tails_ptr,
    keys_ptr,
    q_segment_ptr,
    k_segment_ptr,
    seed_ptr,
    table_ptr,
    mass_ptr,
    rest_ptr,
    far_left_ptr,
    far_left_lse_ptr,
    far_right_ptr,
    far_right_lse_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_n,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    stride_v_b,
    stride_v_h,
    stride_v_n,
    stride_band_b,
    stride_band_h,
    stride_band_q,
    stride_tail_kind,
    stride_tail_b,
    stride_tail_h,
    stride_tail_q,
    stride_keys_b,
    stride_qs_b,
    stride_ks_b,
    stride_table_h,
    n_heads,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    value_reach,
    before,
    after,
    far_start,
    scale,
    dropout,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEAR_N: tl.constexpr,  # keys a step near the diagonal: divides BLOCK_N
    STAGES: tl.constexpr,
    BAND: tl.constexpr,
    EXTENT: tl.constexpr,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
    VALUES: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr,
    DROPOUT: tl.constexpr,
    REST: tl.constexpr,
    FAR: tl.constexpr,  # keys at |lag| >= far_start were attended to elsewhere: start from there
    CAUSAL: tl.constexpr,
    EXACT: tl.constexpr,  # precision of products with the value table, which is in float32
    PRECISION: tl.constexpr,
):
    """One block of query rows of one head."""
    block = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    r = tl.arange(0, BLOCK_M)
    rows = block * BLOCK_M + r
    row = rows.to(tl.int64)
    first_row = block.to(tl.int64) * BLOCK_M
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    q = tl.load(
        q_ptr + b * stride_q_b + h * stride_q_h + row[:, None] * stride_q_n + d[None, :],
        mask=(rows < n_q)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    k_ptr += b * stride_k_b + (h // GROUPS) * stride_k_h
    v_ptr += b * stride_v_b + (h // GROUPS) * stride_v_h
    near_reach = n_k * 0
    if BAND:
        band_ptr += b * stride_band_b + h * stride_band_h + first_row * stride_band_q
        near_reach = reach
        if EXTENT:
            near_reach = tl.minimum(reach, tl.load(extent_ptr + h))
    if TAILS:
        tails_ptr += b * stride_tail_b + h * stride_tail_h
    left, left_slope, right, right_slope = load_tails(
        tails_ptr,
        rows,
        rows < n_q,
        stride_tail_kind,
        stride_tail_q,
        TAILS,
        SLOPES,
        PER_ROW,
    )
    if KEYS:
        keys_ptr += b * stride_keys_b
    q_segment = rows
    if SEGMENTS:
        q_segment = tl.load(q_segment_ptr + b * stride_qs_b + rows, mask=rows < n_q, other=-2)
        k_segment_ptr += b * stride_ks_b
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr) + bh
    if VALUES:
        near_reach = tl.maximum(near_reach, value_reach)
        mass_ptr += (bh * n_q + first_row) * (2 * value_reach + 1)
    if FAR:
        near_reach = tl.maximum(near_reach, far_start - 1)
    first = block * BLOCK_M + q_start
    last = tl.minimum((block + 1) * BLOCK_M, n_q) - 1 + q_start
    low, high = n_k * 0, n_k
    if BEFORE:
        low = first - before
    if AFTER:
        high = last + after + 1
    low, high = whole_blocks(low, high, n_k, BLOCK_N)
    near_start, near_stop = near_range(first, last, near_reach, low, high, BLOCK_N)
    scale2 = scale * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    left_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    right_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    if FAR:
        out_left, lse_left, out_right, lse_right = far_state(
            far_left_ptr,
            far_left_lse_ptr,
            far_right_ptr,
            far_right_lse_ptr,
            bh,
            rows,
            n_q,
            far_start,
            d_v,
            left,
            right,
            D_V,
            CAUSAL,
        )
        top = tl.maximum(lse_left, lse_right)
        base = tl.where(top == float("-inf"), 0.0, top)
        left_mass = tl.exp2(lse_left - base)
        right_mass = tl.exp2(lse_right - base)
        total = left_mass + right_mass
        acc = left_mass[:, None] * out_left + right_mass[:, None] * out_right
    for REGION in tl.static_range(3):
        if REGION == 0:
            start, stop = low, near_start
        elif REGION == 1:
            start, stop = near_start, near_stop
        else:
            start, stop = near_stop, high
        if REGION == 1 or not FAR:
            acc, top, total, left_mass, right_mass = attended_range(
                acc,
                top,
                total,
                left_mass,
                right_mass,
                q,
                k_ptr,
                v_ptr,
                band_ptr,
                left,
                left_slope,
                right,
                right_slope,
                keys_ptr,
                q_segment,
                k_segment_ptr,
                mass_ptr,
                seed,
                rows,
                r,
                first,
                start,
                stop,
                n_q,
                n_k,
                q_start,
                reach,
                edge,
                value_reach,
                before,
                after,
                scale2,
                dropout,
                stride_k_n,
                stride_v_n,
                stride_band_q,
                D,
                D_V,
                BLOCK_D,
                BLOCK_DV,
                NEAR_N if REGION == 1 else BLOCK_N,
                REGION,
                BAND,
                TAILS,
                SLOPES,
                PER_ROW,
                PER_ROW,
                VALUES,
                BEFORE,
                AFTER,
                KEYS,
                SEGMENTS,
                EVEN_N,
                DROPOUT,
                STAGES,
                PRECISION,
            )
    safe = tl.where(total == 0.0, 1.0, total)
    out = acc / safe[:, None]
    # In base 2; +inf for a row that saw nothing, so that exp2(logit - lse) is 0 in backward.
    lse = tl.where(total == 0.0, float("inf"), top + tl.log2(safe))
    if VALUES:
        out = _with_table(
            out,
            mass_ptr,
            table_ptr + h * stride_table_h,
            lse,
            left_mass / safe,
            right_mass / safe,
            r,
            rows < n_q,
            first,
            low,
            tl.minimum(high, n_k),
            value_reach,
            dropout,
            D_V,
            BLOCK_DV,
            EXACT,
        )
    place = bh * n_q + row
    tl.store(lse_ptr + place, lse, mask=rows < n_q)
    there = (rows < n_q)[:, None] & (d_v < D_V)[None, :]
    cells = place[:, None] * D_V + d_v[None, :]
    short = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cells, short, mask=there)
    if REST:  # what rounding took: backward's delta needs it where gradients of a bias are summed
        rest = out - short.to(tl.float32)
        tl.store(rest_ptr + cells, rest.to(rest_ptr.dtype.element_ty), mask=there)
