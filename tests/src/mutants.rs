//! Mutants that the fault tests must catch, defined as source edits. The product does not contain
//! them.
//!
//! The workspace is copied below the target folder, and all edits are applied to the copy. The
//! program is built there as `switchyard-mutants`, in the same target folder and with the same
//! crates, except those with edits. `SWITCHYARD_MUTANT` selects the active mutant; without it, the
//! program behaves like `switchyard-controller`.

use crate::{root, target};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variable with the name of the active mutant.
pub const ACTIVE_MUTANT: &str = "SWITCHYARD_MUTANT";

/// A mutant: code inserted before a text that occurs exactly once in a file.
struct Mutant {
    name: &'static str,
    file: &'static str,
    /// Unmodified product text.
    before: &'static str,
    /// Rust code inserted before it; `bug!()` is true when the mutant is active.
    insert: &'static str,
}

const MUTANTS: [Mutant; 7] = [
    Mutant {
        name: "waits-for-zombies",
        file: "src/plan/cluster/step.rs",
        before: "    let missing = attempt.pods.iter().filter(|pod| pod.is_none()).count();\n",
        insert: "    if bug!() && attempt.snapshot.pods.iter().any(|pod| pod.attempt < attempt.number) {\n        \
                 return Reconciliation { actions, ..Reconciliation::default() };\n    }\n",
    },
    Mutant {
        name: "half-a-gang",
        file: "src/plan/cluster/step.rs",
        before: "    actions.extend(numbered.map(|(rank, _)| {\n",
        insert: "    let numbered = numbered.filter(|_| !(bug!() && missing < attempt.pods.len()));\n",
    },
    Mutant {
        name: "another-name",
        file: "src/controller/apply/executor.rs",
        before: "            Err(error) if error.cause == Cause::Exists => {\n",
        insert: "            Err(error) if error.cause == Cause::Unreachable && bug!() => {\n                \
                 let mut another = object.clone();\n                \
                 another.meta_mut().name = Some(format!(\"{name}-again\"));\n                \
                 let written = self.call(&operation, api.create(&params, &another)).await?;\n                \
                 Ok(Done::Written(kind.name(), written.resource_version()))\n            }\n",
    },
    Mutant {
        name: "name-is-taken",
        file: "src/controller/apply/executor.rs",
        before: "            Err(error) if error.cause == Cause::Exists => {\n",
        insert: "            Err(error) if error.cause == Cause::Exists && bug!() => {\n                \
                 let mut another = object.clone();\n                \
                 another.meta_mut().name = Some(format!(\"{name}-again\"));\n                \
                 let written = self.call(&operation, api.create(&params, &another)).await?;\n                \
                 Ok(Done::Written(kind.name(), written.resource_version()))\n            }\n",
    },
    Mutant {
        name: "forgets-promises",
        file: "src/ledger/index/pods.rs",
        before: "        let before = self.usage.share(&pod.uid).filter(|_| promised.is_none() && is_open);\n",
        insert: "        let promised = promised.filter(|_| !bug!());\n",
    },
    Mutant {
        name: "ghosts",
        file: "src/controller/watch.rs",
        before: "        gone.map(|(name, uid)| metadata_of(name, uid)).collect()\n",
        insert: "        let gone = gone.filter(|_| !bug!());\n",
    },
    Mutant {
        name: "forgets",
        file: "src/controller/reconcile.rs",
        before: "        let until = self.queue.failed(key);\n",
        insert: "        if bug!() {\n            return Outcome::Refused;\n        }\n",
    },
];

/// Applies a mutant to the text of a file.
///
/// # Errors
/// The product does not contain the anchor text exactly once.
fn mutate(mutant: &Mutant, product: &str, text: &str) -> Result<String, String> {
    let count = product.matches(mutant.before).count();
    if count != 1 {
        return Err(format!(
            "{}: {} has {count} times {:?}; expected once: adapt tests/src/mutants.rs",
            mutant.name, mutant.file, mutant.before
        ));
    }
    let active = format!("matches!(std::env::var(\"{ACTIVE_MUTANT}\").as_deref(), Ok(\"{}\"))", mutant.name);
    let at = text.find(mutant.before).expect("invariant: only insertions");
    Ok(format!("{}{}{}", &text[..at], mutant.insert.replace("bug!()", &active), &text[at..]))
}

/// Writes the mutants to a copy of the workspace and returns its folder. Unedited files have the
/// modification times of the originals, so that cargo reuses the crates without edits.
///
/// # Panics
/// A file cannot be read or written, or an edit does not apply.
pub(crate) fn copy() -> PathBuf {
    let folder = target().join("mutants");
    let files = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    let files = String::from_utf8(files.expect("git ls-files").stdout).expect("file names are UTF-8");
    for file in files.lines().filter(|file| !file.starts_with("docs/results/")) {
        let Ok(bytes) = fs::read(root().join(file)) else { continue };
        let edited = match str::from_utf8(&bytes) {
            Ok(text) => transform(file, text).unwrap_or_else(|fault| panic!("{fault}")),
            Err(_) => None,
        };
        let path = folder.join(file);
        match edited {
            Some(text) => write(&path, text.as_bytes()),
            None => {
                write(&path, &bytes);
                let modified = fs::metadata(root().join(file)).and_then(|original| original.modified());
                modified
                    .and_then(|modified| File::options().append(true).open(&path)?.set_modified(modified))
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            }
        }
    }
    folder
}

/// Returns the text of a file in the copy; `None` if the file is not edited.
fn transform(file: &str, product: &str) -> Result<Option<String>, String> {
    if let Some(folder) = file.strip_suffix("Cargo.toml")
        && MUTANTS.iter().any(|mutant| mutant.file.starts_with(folder) && !folder.is_empty())
    {
        // Cargo distinguishes packages by their path in the workspace and their version, not by the
        // workspace's folder. Both workspaces share a target folder, so with the same version they
        // would overwrite and reuse each other's crates.
        let inherited = "\nversion.workspace = true\n";
        if !product.contains(inherited) {
            return Err(format!("{file}: expected `version.workspace = true`"));
        }
        let own = format!("\nversion = \"{}-mutants\"\n", env!("CARGO_PKG_VERSION"));
        // Build only the controller, because the other commands of `switchyard` would double the
        // build.
        let program = match folder {
            "src/controller/" => "\n[[bin]]\nname = \"switchyard-mutants\"\npath = \"main.rs\"\n",
            _ => "",
        };
        return Ok(Some(product.replacen(inherited, &own, 1) + program));
    }
    let mut mutants = MUTANTS.iter().filter(|mutant| mutant.file == file).peekable();
    if mutants.peek().is_none() {
        return Ok(None);
    }
    mutants.try_fold(product.to_string(), |text, mutant| mutate(mutant, product, &text)).map(Some)
}

fn write(path: &Path, bytes: &[u8]) {
    if fs::read(path).is_ok_and(|before| before == bytes) {
        return;
    }
    let parent = path.parent().expect("invariant: a file has a parent folder");
    fs::create_dir_all(parent)
        .and_then(|()| fs::write(path, bytes))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_applies() {
        for mutant in &MUTANTS {
            let product = fs::read_to_string(root().join(mutant.file)).unwrap();
            let text = mutate(mutant, &product, &product).unwrap();
            assert!(text.len() > product.len() && text.contains(mutant.name), "{}", mutant.name);
        }
    }

    #[test]
    fn edited_crates_have_their_own_version() {
        for mutant in &MUTANTS {
            let folders = mutant.file.match_indices('/').map(|(end, _)| &mutant.file[..end]);
            let mut manifests = folders.map(|folder| format!("{folder}/Cargo.toml"));
            let manifest = manifests.rfind(|file| root().join(file).is_file()).unwrap();
            let product = fs::read_to_string(root().join(&manifest)).unwrap();
            let copy = transform(&manifest, &product).unwrap().unwrap();
            assert!(copy.contains("-mutants\"\nedition"), "{manifest}: {copy}");
        }
        assert!(transform("src/plan/Cargo.toml", "[package]\nversion = \"1\"\n").is_err());
        let root_manifest = "[workspace]\nversion.workspace = true\n";
        for file in ["Cargo.toml", "crds/Cargo.toml", "src/core/Cargo.toml"] {
            assert_eq!(transform(file, root_manifest), Ok(None), "{file} has no edits");
        }
    }

    #[test]
    fn ambiguous_mutants_are_rejected() {
        for product in ["fn f() {}", "x\nx\n"] {
            let mutant = Mutant { name: "m", file: "f.rs", before: "x\n", insert: "y\n" };
            assert!(mutate(&mutant, product, product).unwrap_err().contains("expected once"));
        }
    }
}
