//! Chart rendering with helm alone, without a cluster.

use crate::chart::{MONITORING, files};
use anyhow::Result;
use switchyard_tests::chart::{chart, objects, render, run_helm};
use switchyard_tests::{difference, root};

#[test]
fn helm_lint_passes() {
    for (name, path, _) in files("values") {
        // `helm lint` cannot set the cluster's capabilities.
        let ended = run_helm(&["lint", ".", "--values", path.to_str().unwrap(), "--set", "metrics.renderMode=always"]);
        assert_eq!(ended.code, Some(0), "{name}: {}{}", ended.stdout, ended.stderr);
        assert!(!ended.stdout.contains("[WARNING]") && !ended.stdout.contains("[ERROR]"), "{name}: {}", ended.stdout);
    }
}

#[test]
fn every_set_of_values_matches_the_reviewed_rendering() -> Result<()> {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(root().join("tests/golden/chart"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let sets = files("values");
    assert!(sets.len() >= 8 && sets[0].0 == "default", "{} sets", sets.len());
    let mut default = None;
    for (name, path, _) in sets {
        // The CRDs are compared below, because they are 330 kB.
        let arguments =
            [&["--values", path.to_str().unwrap(), "--set", "crds.enabled=false"][..], &MONITORING].concat();
        let text = render(&arguments)?;
        let (first, rest) = text.split_once("---\n").unwrap_or(("", &text));
        assert_eq!(first, "", "{name}");
        // All other sets are compared with the default.
        let shown = default.as_deref().map_or_else(|| rest.to_owned(), |default| difference(default, rest));
        settings.bind(|| insta::assert_snapshot!(name.as_str(), shown));
        default.get_or_insert_with(|| rest.to_owned());
    }
    Ok(())
}

/// Every object has the standard labels.
#[test]
fn every_object_is_ours() -> Result<()> {
    for (name, path, _) in files("values") {
        let arguments = [&["--values", path.to_str().unwrap()][..], &MONITORING].concat();
        for object in objects(&render(&arguments)?)? {
            let its = format!("{name}: {} {}", object["kind"], object["metadata"]["name"]);
            let is_extra = object["metadata"]["name"] == "switchyard-more";
            assert!(
                is_extra || object["metadata"]["labels"]["app.kubernetes.io/instance"] == "switchyard",
                "{its}: {object}"
            );
            assert!(is_extra || object["metadata"]["labels"]["app.kubernetes.io/name"] == "switchyard", "{its}");
        }
    }
    Ok(())
}

#[test]
fn the_crds_match_the_code_and_are_kept() -> Result<()> {
    let files = ["trainjobs", "placementslices", "gputopologies"].map(|name| format!("templates/crds/{name}.yaml"));
    let show: Vec<&str> = files.iter().flat_map(|file| ["--show-only", file]).collect();
    let rendered = objects(&render(&show)?)?;
    assert_eq!(rendered.len(), 3);
    for (_, crd) in switchyard_crds::generate::crds() {
        let expected = serde_json::to_value(&crd)?;
        let found = rendered.iter().find(|found| found["metadata"]["name"] == expected["metadata"]["name"]).unwrap();
        assert!(found["spec"] == expected["spec"], "{}", expected["metadata"]["name"]);
        assert_eq!(found["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
    }
    let dropped = objects(&render(&[&show[..], &["--set", "crds.keep=false"]].concat())?)?;
    assert!(dropped.iter().all(|crd| crd["metadata"]["annotations"].is_null()));
    Ok(())
}

/// Programs, images and chart share one version.
#[test]
fn the_chart_has_the_version_of_the_programs() {
    let text = std::fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    let chart: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(
        (&chart["version"], &chart["appVersion"]),
        (&env!("CARGO_PKG_VERSION").into(), &env!("CARGO_PKG_VERSION").into())
    );
}
