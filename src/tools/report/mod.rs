//! Reports on a run: turns its directory into figures, advice and one page. Pure: text in, text
//! out.
//!
//! ```text
//! plan.yaml, engine.json, inspection.json, machine.json, status.yaml ─┐
//! events.jsonl ───────────────────────────────────────────────────────┼─> Record ─> Facts ─> advice ─┐
//! record/rank-R.steps.jsonl, line by line ────────────────────────────┘      └───────────────────────┴─> Report ─> html, JSON
//! ```
//!
//! A [`Record`] folds its input into at most 240 windows of steps per rank, so its memory does not
//! depend on the length of the run. The same input gives the same bytes.

mod advice;
mod build;
mod curves;
mod documents;
mod events;
mod facts;
mod fold;
mod html;
mod kernels;
mod launches;
mod layers;
mod markup;
mod model;
mod record;
mod sample;
mod setting;
mod skew;
mod svg;
mod windows;

pub use advice::{Basis, Change, Chart, RULES, Rule};
pub use documents::Document;
pub use facts::Facts;
pub use html::html;
pub use markup::escaped;
pub use model::{Item, Report};
pub use record::Record;
pub use sample::Part;
