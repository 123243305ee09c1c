//! The preflight: for each of the 27 checks a fixture that trips it and one that does not; no false
//! alarms on healthy machines; and the command.

mod checks;
mod gangs;
mod healthy;
mod screen;
mod stage;

use crate::fabric::scenes;
