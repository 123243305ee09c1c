//! The controller, the node agent and the chart on a real API server.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unwrap_used)]

mod admission;
mod agent;
mod chart;
mod churn;
mod controller;
mod devices;
mod documents;
mod faults;
mod fights;
mod lifecycle;
mod malformed;
mod rights;
mod size;
mod tenants;
