//! What is near to what: machines, their devices and the network between them. Pure functions over plain values.

pub mod path;
