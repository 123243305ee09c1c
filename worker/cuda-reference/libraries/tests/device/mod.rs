//! The reference GPU through the engine's calls.

use crate::child;
use std::path::Path;
use switchyard_cuda::driver::{Context, Driver, Stream};
use switchyard_cuda::find::{DRIVER, Places};

pub struct Gpu {
    pub context: Context,
    pub stream: Stream,
}

pub fn places() -> Places {
    Places::new(|name| std::env::var_os(name), Path::new("/"), None)
}

impl Gpu {
    /// In a child, whose environment names the libraries.
    pub fn new() -> Gpu {
        Gpu::of(0)
    }

    /// The GPU with this number.
    pub fn of(index: usize) -> Gpu {
        let driver = Driver::new(&places().open(&DRIVER).unwrap().library).unwrap();
        let device = driver.devices().unwrap().remove(index);
        let context = driver.context(&device).unwrap();
        Gpu { stream: context.stream().unwrap(), context }
    }
}

/// Runs a test in a child that has a device.
pub fn on_a_device(test: &str, variables: &[(&str, &str)], run: impl FnOnce()) {
    if child::role().is_some() {
        return run();
    }
    let output = child::start(test, true, variables);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
}

/// Test value at `index` of stream `seed`, between -1 and 1.
pub fn number(seed: usize, index: usize) -> f32 {
    let mut bits = (index as u64).wrapping_add((seed as u64) << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((bits >> 40) as f32 / 8_388_608.0) - 1.0
}
