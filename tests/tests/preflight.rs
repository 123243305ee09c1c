//! The preflight: each of the 27 checks by a scene that trips it and one that does not, no false alarm on healthy machines, and the command.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "preflight/checks.rs"]
mod checks;
#[path = "preflight/gangs.rs"]
mod gangs;
#[path = "preflight/healthy.rs"]
mod healthy;
#[allow(dead_code)]
#[path = "fabric/scenes.rs"]
mod scenes;
#[path = "preflight/screen.rs"]
mod screen;
#[path = "preflight/stage.rs"]
mod stage;
