# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The tapes of the kinds of blocks, and of what comes before and after them."""

from collections.abc import Callable

from megatron_leangrpo.models.common.shape import BlockKind, TransformerShape
from megatron_leangrpo.planner.blocks import BlockWriter, Layout
from megatron_leangrpo.planner.tape import Tape


def block_tape(kind: BlockKind, shape: TransformerShape, layout: Layout) -> Tape:
    """The tape of one block."""
    return _WRITERS[kind](shape, layout)


def _double(shape: TransformerShape, layout: Layout) -> Tape:
    """`models/flux`: image and text with weights of their own and joint attention."""
    write = BlockWriter(shape, layout)
    tape, tokens = write.tape, {"img": shape.image_tokens, "txt": shape.text_tokens}
    vec = tape.tensor("vec", 0)
    chunks = {name: write.modulation(vec, 6) for name in tokens}
    packed, values, streams = {}, {}, {}
    for name, count in tokens.items():
        streams[name] = tape.tensor(name, write.stream(count))
        x = write.modulated_norm(name, chunks[name][0], chunks[name][1], count)
        qkv = write.column("double.qkv", x, 3 * write.own_hidden, count)
        packed[name], values[name] = write.queries_keys(qkv, write.projected(count))
    projected = {name: write.projected(count) for name, count in tokens.items()}
    own = write.rows(sum(projected.values()), write.own_hidden)
    qk = tape.add("joined qk", 2 * own, packed.values(), aliases=packed.values())
    v = tape.add("joined v", own, values.values(), aliases=values.values())
    out = write.self_attention(qk, v, *tokens.values())
    parts = {name: write.rows(count, write.own_hidden) for name, count in projected.items()}
    attended = dict(zip(tokens, tape.split(out, parts)))
    for name, count in tokens.items():
        own_attended = write.with_pads(attended[name], count)
        update = write.row("double.out", {own_attended: write.own_hidden}, count)
        streams[name] = write.gated_residual(streams[name], chunks[name][2], update, count)
    for name, count in tokens.items():
        x = write.modulated_norm(streams[name], chunks[name][3], chunks[name][4], count)
        update = write.mlp("double", x, count)
        write.gated_residual(streams[name], chunks[name][5], update, count)
    return tape


def _single(shape: TransformerShape, layout: Layout) -> Tape:
    """`models/flux`: attention and MLP side by side over the joined tokens."""
    write = BlockWriter(shape, layout)
    tape, streams = write.tape, (shape.text_tokens, shape.image_tokens)
    projected = write.projected(*streams)
    vec = tape.tensor("vec", 0)
    tokens = tape.tensor("tokens", write.stream(*streams))
    shift, scale, gate = write.modulation(vec, 3)
    x = write.gather(write.modulated_norm(tokens, shift, scale, *streams), *streams)
    qkv = write.column("single.qkv", x, 3 * write.own_hidden, *streams, gathered=True)
    has_pads = write.padded(*streams) != projected
    if has_pads:
        qkv = tape.add("without pads", write.rows(projected, 3 * write.own_hidden), [qkv])
    qk, v = write.queries_keys(qkv, projected)
    attended = write.self_attention(qk, v, *streams)
    tape.keep_to_the_end(x, qk, v, attended)
    fc1 = write.column("single.fc1", x, write.own_ffn, *streams, gathered=True)
    wide = write.gelu(fc1, *streams)
    if has_pads:
        size = write.rows(write.padded(*streams), write.own_hidden)
        attended = tape.add("with pads", size, [attended])
    update = write.row("single.out", {attended: write.own_hidden, wide: write.own_ffn}, *streams)
    write.gated_residual(tokens, gate, update, *streams)
    return tape


def _cross(shape: TransformerShape, layout: Layout) -> Tape:
    """Wan: self-attention, attention to the text, MLP; norms of queries and keys span all heads."""
    write = BlockWriter(shape, layout)
    tape, video, text = write.tape, shape.image_tokens, shape.text_tokens
    own = write.own_hidden
    x = tape.tensor("x", write.stream(video))
    # Every block attends to the same text, and adds a table to the same vectors: others hold them.
    context = tape.tensor("context", 0)
    vectors = tape.add("modulation", 6 * write.vector, [tape.tensor("vectors", 0)])
    chunks = tape.split(vectors, {f"chunk {n}": write.vector for n in range(6)})

    factor = tape.add("1 + scale", write.vector, [chunks[1]])
    normed = write.scaled_norm(x, chunks[0], factor, video)
    projected = write.projected(video)
    qk, v = write.queries_keys(write.column("cross.qkv", normed, 3 * own, video), projected)
    attended = write.with_pads(write.self_attention(qk, v, video), video)
    update = write.row("cross.out", {attended: own}, video)
    x = write.gated_residual(x, chunks[2], update, video)

    weights = tape.split(tape.tensor("norm3", 0), {"bias": 0, "weight": 0})
    q = write.column("cross.q", write.scaled_norm(x, *weights, video), own, video)
    q = write.normalised(q, write.rows(projected, own), projected * write.own_heads)
    kv = tape.add(
        "text kv",
        write.rows(text, 2 * own),
        [context],
        **(
            write.kept("cross.kv", context, (write.hidden, 2 * own), text)
            if layout.adapters
            else {"weight": 2 * own * write.hidden * layout.width}
        ),
        flops=4.0 * text * layout.batch * own * write.hidden,
    )
    k, v = tape.split(kv, {"k": write.rows(text, own), "v": write.rows(text, own)})
    k = write.normalised(k, write.rows(text, own), text * write.own_heads)
    attended = write.with_pads(write.attention(q, k, v, projected, text, own), video)
    update = write.row("cross.text out", {attended: own}, video)
    x = tape.add("residual", write.stream(video), [x, update], aliases=[x, update])

    factor = tape.add("1 + scale", write.vector, [chunks[4]])
    normed = write.scaled_norm(x, chunks[3], factor, video)
    write.gated_residual(x, chunks[5], write.mlp("cross", normed, video), video)
    return tape


_WRITERS: dict[BlockKind, Callable[[TransformerShape, Layout], Tape]] = {
    "double": _double,
    "single": _single,
    "cross": _cross,
}


def output_tape(shape: TransformerShape, layout: Layout) -> Tape:
    """The modulated projection of the image tokens to velocities, gathered over the ranks."""
    write = BlockWriter(shape, layout)
    tape, count = write.tape, shape.image_tokens
    vec = tape.tensor("vec", 0)
    # A view of the last block's output, text included where the streams are joined.
    joined = any(kind == "single" for kind, _ in shape.blocks)
    streams = (shape.text_tokens, count) if joined else (count,)
    tokens = tape.tensor("tokens", write.stream(*streams))
    img = tape.split(tokens, {"img": write.stream(count)})[0]
    scale, shift = write.modulation(vec, 2)
    if shape.blocks[0][0] == "cross":
        factor = tape.add("1 + scale", write.vector, [scale])
        x = write.scaled_norm(img, shift, factor, count)
    else:
        x = write.modulated_norm(img, shift, scale, count)
    size = write.rows(layout.shard(count), shape.out_channels)
    out = tape.add(
        "velocity",
        size,
        [x],
        **write.kept("output", x, (shape.hidden, shape.out_channels), layout.shard(count)),
        flops=2.0 * layout.shard(count) * layout.batch * shape.hidden * shape.out_channels,
    )
    whole = write.rows(count, shape.out_channels)
    tape.add("whole velocity", whole, [out], sent=write.sent(whole))
    return tape


def input_bytes(shape: TransformerShape, layout: Layout) -> int:
    """Bytes that the embeddings of latents, text and conditioning keep for their backwards.

    A stage that embeds nothing keeps what it received, of which its first block counts the tokens.
    """
    write = BlockWriter(shape, layout)
    if not shape.is_first or layout.adapters is not None:
        # Frozen embedders keep nothing but what they make.
        return _conditioning(write, shape.kinds[0])
    # The conditioning vector, and the two or three small MLPs it comes from.
    kept = 10 * write.vector
    if shape.kinds[0] == "cross":
        # The text inside and behind its own MLP; all blocks attend to the latter.
        kept += 3 * write.rows(shape.text_tokens, shape.hidden)
    if layout.batch > 1:
        # Put into the order of tokens; a single sample is in that order already.
        kept += write.rows(shape.image_tokens, shape.in_channels)
        kept += write.rows(shape.text_tokens, shape.text_width)
    if layout.gathered * layout.context_parallel > 1:
        # The first block's inputs are views of streams that were embedded whole.
        streams = [shape.image_tokens]
        if shape.blocks[0][0] == "double":
            streams.append(shape.text_tokens)
        for count in streams:
            kept += write.rows(write.all_tokens(count), shape.hidden) - write.stream(count)
    return kept


def embedding_work(shape: TransformerShape, layout: Layout) -> tuple[float, int]:
    """FLOPs and written bytes of embedding latents and text, whole on every rank."""
    if not shape.is_first:
        return 0.0, 0
    write = BlockWriter(shape, layout)
    image, text = shape.image_tokens, shape.text_tokens
    numbers, written = image * shape.in_channels + text * shape.text_width, image + text
    if shape.kinds[0] == "cross":
        # An MLP for the text.
        numbers, written = numbers + text * shape.hidden, written + 2 * text
    return 2.0 * layout.batch * numbers * shape.hidden, write.rows(written, shape.hidden)


def boundary_bytes(shape: TransformerShape, layout: Layout, kind: BlockKind) -> int:
    """Bytes that a stage hands to the next one, which begins with a block of this kind."""
    write = BlockWriter(shape, layout)
    streams = [shape.image_tokens] if kind == "cross" else [shape.text_tokens, shape.image_tokens]
    return write.stream(*streams) + _conditioning(write, kind)


def _conditioning(write: BlockWriter, kind: BlockKind) -> int:
    """What passes a boundary besides the tokens: vectors, and the text that is attended to."""
    if kind != "cross":
        return write.vector
    return 7 * write.vector + write.rows(write.shape.text_tokens, write.hidden)
