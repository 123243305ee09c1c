//! What NCCL will do between the ranks of a gang.

pub mod forecast;
