//! Room for what the ranks tell each other besides the sums of a step: the checkpoint to resume from, the digests of a new
//! one. Each byte travels as a number, and each rank has a slot in every rank's buffer.

/// Numbers that hold the byte count of a rank.
pub(super) const LENGTH: usize = 4;
/// Most bytes about the checkpoint to resume from.
pub(super) const ROOM: usize = 1024;

/// Most bytes that a rank tells the others. `numbers`: those that a checkpoint divides among `world` ranks, 0 without
/// checkpoints.
pub(super) fn room(numbers: usize, world: usize) -> usize {
    // A digest with quotes and comma for every 4 MiB of the largest shard, and room for the rest of the JSON.
    let shard = 4 * numbers.div_ceil(world.max(1));
    ROOM.max(128 + 40 * shard.div_ceil(4 << 20))
}

/// Numbers of the buffer.
pub(super) fn numbers(room: usize, world: usize) -> usize {
    (room + LENGTH) * world
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_grows_with_the_shard_and_not_with_the_whole_state() {
        // 7 billion weights with two moments on 512 ranks.
        let room = room(21_000_000_000, 512);
        assert_eq!(room, 128 + 40 * 40);
        assert!(4 * numbers(room, 512) < 4 << 20, "{} bytes", 4 * numbers(room, 512));
        assert_eq!(super::room(0, 512), ROOM);
    }
}
