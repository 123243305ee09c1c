//! The only code that writes to the cluster: executes actions and writes the status. It makes no
//! decisions.
//!
//! Every write can be repeated: names are deterministic, a create that finds its object is done, a
//! delete and a release name the UID of their object, and a status is written with the resource
//! version from which it was computed. A lost response, a crash between two writes, or a second
//! controller therefore does not change the final state.
//!
//! ```text
//! Action ─> call (with a deadline) ─> Done | ApiError ─> Applied ─> error in the status
//! ```

mod error;
mod executor;
mod status;

pub use error::{ApiError, Cause, Retry};
pub use executor::{Applied, Executor};
