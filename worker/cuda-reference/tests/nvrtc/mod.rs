//! The compiler, as `cargo xtask test` fetches it.

use std::ffi::OsString;
use std::path::Path;
use switchyard_cuda::find::{NVRTC, Places, VARIABLE};
use switchyard_cuda::nvrtc::Nvrtc;

/// NVRTC of the pinned wheel; `None` where nobody has fetched it. `cargo xtask test` requires it with `SWITCHYARD_TEST_NVRTC`, so that no
/// test can pass without it.
pub fn nvrtc() -> Option<Nvrtc> {
    // The package that runs this test may lie at any depth.
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let Some(folder) = above.map(|folder| folder.join("target/data/nvrtc")).find(|folder| folder.is_dir()) else {
        assert!(
            std::env::var_os("SWITCHYARD_TEST_NVRTC").is_none(),
            "target/data/nvrtc is missing, but cargo xtask asked for it"
        );
        println!("no NVRTC: nothing was compiled; `cargo xtask test engine` fetches it");
        return None;
    };
    let get = |name: &str| (name == VARIABLE).then(|| OsString::from(&folder));
    let found = Places::new(get, Path::new("/"), None).open(&NVRTC).unwrap();
    Some(Nvrtc::new(&found.library).unwrap())
}
