//! Placeholder while the room is being built on a branch.
