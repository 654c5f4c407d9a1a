"""A third-party topology, written with `qcomp.extend` only: a binary tree."""

import math

import numpy as np

from qcomp import extend


class Tree(extend.Topology):
    """Sums go up a binary tree to rank 0; its compressed mean goes down as bytes.

    In exchange d a rank r with r mod 2^(d + 1) = 2^d sends the sum of its subtree to r - 2^d.
    """

    name = "tree_of_two"
    roundings = None

    def lay_out(self, operands, chunks=None):
        """Every rank feeds back the loss of its sum, the root that of the mean."""
        (whole,) = operands.chunks(1)
        nothing = tuple(extend.Segment(i, 0, 0, 0) for i in range(len(operands.sizes)))
        root = operands.rank == 0
        residuals = extend.Residuals(nothing if root else operands.whole, operands.whole if root else ())
        return extend.Layout(operands, (whole,), residuals)

    def stages(self, call):
        """Go up and down."""
        layout, codec = call.layout, extend.Codec(call.values)
        (frame,), rank, world = layout.frames, layout.rank, layout.world
        height = (world - 1).bit_length()
        values, residuals, refused, sent = [x + 0 for x in call.values], (), False, None
        for d in range(height):
            sender, step = rank % 2 ** (d + 1) == 2**d, 2**d
            if sender:
                mine = codec.encode(layout.frames, values, call.worker, call.key.at(hop=2), donate=True)
                residuals, sent = mine.residuals, mine
                message = mine.messages[0] if not refused else codec.refusals([frame], None).messages[0]
            receiver = rank % 2 ** (d + 1) == 0 and rank + step < world
            arrived = yield self.between(
                codec, layout, {rank - step: message} if sender else {}, [rank + step] * receiver
            )
            if receiver and codec.refuses(arrived[rank + step], frame, rank + step):
                refused = True
            elif receiver:
                decoded = codec.decode(codec.open_from(rank + step, arrived[rank + step], frame))
                for segment, x in zip(frame.chunk, decoded, strict=True):
                    part = values[segment.tensor][segment.start : segment.stop]
                    part += x
        mean = None
        if rank == 0:
            owed = call.server
            mine = codec.encode(
                layout.frames, [x / world for x in values], owed, call.key.at(hop=1), donate=True
            )
            sent, residuals = mine, mine.residuals
            mean = codec.refusals([frame], None).messages[0] if refused else mine.messages[0]
        for d in reversed(range(height)):
            step = 2**d
            gets = rank % 2 ** (d + 1) == step
            gives = rank % 2 ** (d + 1) == 0 and rank + step < world
            arrived = yield self.between(
                codec, layout, {rank + step: mean} if gives else {}, [rank - step] * gets
            )
            mean = arrived[rank - step] if gets else mean
        if codec.refuses(mean, frame, 0):
            raise extend.NonFiniteError("a value on some rank is not finite") from sent.error
        means = extend.decode_means(codec, [codec.open_from(0, mean, frame)], call)
        if rank == 0:
            return extend.Averaged(means, tuple(call.worker), residuals)
        return extend.Averaged(means, residuals, ())

    @staticmethod
    def between(codec, layout, send, sources):
        """Return an exchange with a few ranks."""
        nothing = codec.like[:0].view(np.uint8)
        return extend.AllToAll(
            tuple(send.get(rank, nothing) for rank in range(layout.world)),
            tuple(layout.message_sizes[0] if rank in sources else 0 for rank in range(layout.world)),
        )

    def cost(self, load, cluster):
        """Return a cost of twice the height of the tree; each rank but the root sends one message, and gets another."""
        height = math.ceil(math.log2(cluster.ranks))
        sent = 2 * (cluster.ranks - 1) / cluster.ranks * load.payload  # the average of the ranks
        wire = 2 * height * cluster.link.seconds(load.payload, ranks=1, messages=1)
        return extend.Cost(load.packed * (load.encode + height * load.add + load.decode), wire, sent)
