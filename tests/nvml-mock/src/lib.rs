//! A `libnvidia-ml.so` that plays the scene beside it: `scene.json`, and `failures.json`, which is read again as soon as it changes.
//!
//! It has the functions that a node agent calls and no others; a function that is not there is what an old driver looks like.
//! The folder is that of the file this was loaded from, so that several copies in one process play several scenes.
#![deny(unsafe_code)]
#![deny(missing_docs)]

#[allow(unsafe_code)]
mod device;
#[allow(unsafe_code)]
mod events;
#[allow(unsafe_code)]
mod links;
#[allow(unsafe_code)]
mod memory;
mod session;
#[allow(unsafe_code)]
mod system;
