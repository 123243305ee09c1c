//! The committed CRDs match the code.
//!
//! If this fails, run `cargo xtask gen`, review `git diff crds/generated`, and commit the change
//! together with the code that caused it. Mention in the commit message any change that invalidates
//! existing objects.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

#[test]
fn generated_crds_match_the_code() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("generated");
    let mut expected: Vec<String> = Vec::new();
    for (name, crd) in switchyard_crds::generate::crds() {
        let committed = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        assert!(
            committed == switchyard_crds::generate::yaml(&crd),
            "crds/generated/{name} differs: run `cargo xtask gen`"
        );
        expected.push(name.to_string());
    }
    let mut present: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    present.sort();
    expected.sort();
    assert_eq!(present, expected, "files in crds/generated");
}
