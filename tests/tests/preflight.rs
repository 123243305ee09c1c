//! The preflight: for each check a fixture that trips it and one that does not; no false alarms on
//! healthy machines; and the command.

mod checks;
mod gangs;
mod healthy;
mod screen;
mod stage;

use crate::fabric::scenes;
