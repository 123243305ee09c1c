//! Tests of whole training runs on CPUs.

mod altered_engine;
mod delayed_outcomes;
mod gathers;
mod replicas;
mod stragglers;

pub(super) use altered_engine::on_two_ranks;
