//! The only code that writes: carries actions out and writes the status. Nothing is decided here.
//!
//! Every write may be repeated: names are deterministic, a create that finds its object is done, a delete names the UID it
//! means, a release names the UID of the pod, and a status is written under the resource version it was made from. So a lost
//! answer, a crash between two writes or a second controller change nothing about where it ends.
//!
//! ```text
//! Action ─> call (with a deadline) ─> Done | Refusal ─> Applied ─> the status says what went wrong
//! ```

mod error;
mod executor;
mod status;

pub use error::{Cause, Refusal, Retry};
pub use executor::{Applied, Executor};
