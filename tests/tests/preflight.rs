//! The preflight: each of the 27 checks by a scene that trips it and one that does not, no false alarm on healthy machines, and the command.

mod checks;
mod gangs;
mod healthy;
#[allow(dead_code)]
#[path = "fabric/scenes.rs"]
mod scenes;
mod screen;
mod stage;
