//! The preflight: each of the 27 checks by a scene that trips it and one that does not, no false alarm on healthy machines, and the command.

mod checks;
mod gangs;
mod healthy;
mod screen;
mod stage;

use crate::fabric::scenes;
