//! Bill of materials of an image in CycloneDX 1.5: the crates linked into its program, and the
//! system libraries.

use super::{Image, Version};
use crate::workspace::cargo;
use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// Debian package of a file, and its version; `None` on other systems.
pub(super) fn package_of(file: &Path) -> Option<(String, String)> {
    let ask = |arguments: &[&str]| {
        let output =
            Command::new("dpkg-query").args(arguments).output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()
    };
    // With a merged /usr, the database can have either name.
    let name = file.to_str()?;
    let other = name.strip_prefix("/usr").map_or_else(|| format!("/usr{name}"), str::to_string);
    let owner = ask(&["--search", name]).or_else(|| ask(&["--search", &other]))?;
    let package = owner.split(':').next()?.to_string();
    let version = ask(&["--show", "--showformat=${Version}\n", &package])?;
    Some((package, version.lines().next()?.to_string()))
}

/// The bill of materials of an image. It is dated by the commit and has no serial number, so the
/// same build gives the same text.
pub(super) fn sbom(image: &Image, version: &Version, packages: &BTreeMap<String, String>) -> Result<String> {
    let metadata = metadata()?;
    let checksums = checksums()?;
    let list = |value: &Json| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Json| value.as_str().unwrap_or_default().to_string();
    let crates: BTreeMap<String, Json> =
        list(&metadata["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
    let needs: BTreeMap<String, Vec<String>> = list(&metadata["resolve"]["nodes"])
        .iter()
        .map(|node| {
            (
                text(&node["id"]),
                list(&node["deps"]).iter().filter(|need| is_linked(need)).map(|need| text(&need["pkg"])).collect(),
            )
        })
        .collect();
    let mut program = crates.iter().filter(|(_, package)| package["name"] == image.package).map(|(id, _)| id.clone());
    let program = program.next().with_context(|| format!("cargo lists no package {}", image.package))?;

    let mut seen = BTreeSet::from([program.clone()]);
    let mut open = vec![program.clone()];
    while let Some(id) = open.pop() {
        for need in needs.get(&id).into_iter().flatten() {
            // Crates that only run in the compiler are in no image.
            if !is_macro(&crates[need]) && seen.insert(need.clone()) {
                open.push(need.clone());
            }
        }
    }
    let name = |id: &String| format!("pkg:cargo/{}@{}", text(&crates[id]["name"]), text(&crates[id]["version"]));
    let mut components: Vec<Json> = Vec::new();
    for id in seen.iter().filter(|id| **id != program) {
        let package = &crates[id];
        let key = (text(&package["name"]), text(&package["version"]));
        let mut component =
            json!({"type": "library", "bom-ref": name(id), "name": key.0, "version": key.1, "purl": name(id)});
        if let Some(licence) = package["license"].as_str() {
            // Older crates use a slash for OR.
            component["licenses"] = json!([{"expression": licence.replace('/', " OR ")}]);
        }
        if let Some(checksum) = checksums.get(&key) {
            component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
        }
        components.push(component);
    }
    for (package, version) in packages {
        let purl = format!("pkg:deb/debian/{package}@{version}");
        components.push(json!({"type": "library", "bom-ref": purl, "name": package, "version": version, "purl": purl}));
    }
    let system: Vec<String> =
        packages.iter().map(|(package, version)| format!("pkg:deb/debian/{package}@{version}")).collect();
    let dependencies: Vec<Json> = seen
        .iter()
        .map(|id| {
            let linked = needs.get(id).into_iter().flatten().filter(|need| seen.contains(*need)).map(name);
            let more = system.iter().filter(|_| *id == program).cloned();
            json!({"ref": name(id), "dependsOn": linked.chain(more).collect::<BTreeSet<_>>()})
        })
        .collect();
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": name(&program), "name": image.name, "version": version.number, "purl": name(&program),
                "licenses": [{"expression": "Apache-2.0"}],
                "properties": [{"name": "switchyard:commit", "value": version.commit.as_deref().unwrap_or("unknown")}]},
        },
        "components": components,
        "dependencies": dependencies,
    });
    Ok(serde_json::to_string_pretty(&bill)? + "\n")
}

/// Whether a dependency is linked rather than used only for building or testing.
fn is_linked(need: &Json) -> bool {
    need["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
}

fn is_macro(package: &Json) -> bool {
    let targets = package["targets"].as_array();
    targets.is_some_and(|targets| targets.iter().any(|target| target["kind"] == json!(["proc-macro"])))
}

/// The dependency graph that cargo resolved for this platform.
fn metadata() -> Result<&'static Json> {
    static METADATA: OnceLock<Json> = OnceLock::new();
    if let Some(metadata) = METADATA.get() {
        return Ok(metadata);
    }
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut ask = cargo(&["metadata", "--format-version", "1", "--locked", "--filter-platform", &platform]);
    let output = ask.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata = serde_json::from_slice(&output.stdout)?;
    Ok(METADATA.get_or_init(|| metadata))
}

/// SHA-256 of the crates in Cargo.lock, by name and version.
fn checksums() -> Result<BTreeMap<(String, String), String>> {
    let text = std::fs::read_to_string(crate::workspace::root().join("Cargo.lock")).context("Cargo.lock")?;
    let field = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")));
        line.map(|value| value.trim_matches('"').to_string())
    };
    let blocks = text.split("[[package]]");
    Ok(blocks
        .filter_map(|block| Some(((field(block, "name")?, field(block, "version")?), field(block, "checksum")?)))
        .collect())
}
