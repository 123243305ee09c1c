//! A `libnvidia-ml.so` that plays the scene in its own folder: `scene.json`, and `failures.json`,
//! which it rereads after every change.
//!
//! It exports only the functions that the node agent calls. A missing function stands for an old
//! driver. Several copies in one process play several scenes, each from its own folder.
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
