//! The page in Chromium: light and dark, wide and narrow. Saves screenshots to `target/report`.

use super::{TIMEOUT, failed_once, output};
use serde_json::Value;
use std::path::Path;
use switchyard_tests::{Ended, Program, Scene};

/// A page that embeds the report and inspects it from outside, because the report itself has no
/// scripts.
const INSPECTOR: &str = include_str!("inspector.html");

/// Window height that shows the whole page.
const HEIGHT: u32 = 4600;

fn chromium(folder: &Path, arguments: &[String]) -> Ended {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::split_paths(&folders).map(|path| path.join("chromium")).find(|path| path.is_file());
    let program = program.expect("chromium is not on the PATH: `cargo xtask test report` installs it where apt can");
    let common = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--allow-file-access-from-files",
        "--disable-web-security",
    ];
    let profile = format!("--user-data-dir={}", folder.join("profile").display());
    let all = common.map(String::from).into_iter().chain([profile]).chain(arguments.iter().cloned());
    let ended = Program::new(&program, folder, all).run(TIMEOUT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}

/// Faults of `page.html` in a folder at this width and theme.
fn faults(folder: &Path, width: u32, dark: bool, picture: Option<&Path>) -> Vec<String> {
    std::fs::write(
        folder.join("inspector.html"),
        INSPECTOR.replace("WIDTH", &width.to_string()).replace("HEIGHT", &HEIGHT.to_string()),
    )
    .unwrap();
    let url = format!("file://{}", folder.join("inspector.html").display());
    let theme = format!("--blink-settings=preferredColorScheme={}", u32::from(!dark));
    let size = format!("--window-size={},{HEIGHT}", width.max(500));
    if let Some(picture) = picture {
        chromium(folder, &[theme.clone(), size.clone(), format!("--screenshot={}", picture.display()), url.clone()]);
    }
    let seen = chromium(folder, &[theme, size, "--virtual-time-budget=3000".into(), "--dump-dom".into(), url]);
    let found = seen.stdout.split_once("<pre id=\"found\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let found = found.unwrap_or_else(|| panic!("the inspector found nothing:\n{}\n{}", seen.stdout, seen.stderr)).0;
    let found: Value =
        serde_json::from_str(&found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")).unwrap();
    let mut faults: Vec<String> =
        found["faults"].as_array().unwrap().iter().map(|fault| fault.as_str().unwrap().into()).collect();
    assert_eq!(found["dark"], dark, "the theme was not applied");
    faults.extend(seen.stderr.lines().filter(|line| line.contains("CONSOLE")).map(|line| format!("console: {line}")));
    faults
}

#[test]
fn chromium_renders_the_page_without_errors() {
    let scene = Scene::new();
    failed_once().write(&scene.join("run"));
    let ended = scene.switchyard(["report", "run", "--out", "page.html"]).run(TIMEOUT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for width in [1280, 420] {
        for dark in [false, true] {
            let picture = output().join(format!("report-{width}-{}.png", if dark { "dark" } else { "light" }));
            let faults = faults(scene.path(), width, dark, Some(&picture));
            assert_eq!(faults, Vec::<String>::new(), "{width} px, dark: {dark}");
            assert!(std::fs::metadata(&picture).unwrap().len() > 20_000, "an empty picture: {}", picture.display());
        }
    }
}

#[test]
fn the_inspector_detects_injected_faults() {
    let scene = Scene::new();
    failed_once().write(&scene.join("run"));
    scene.switchyard(["report", "run", "--out", "page.html"]).run(TIMEOUT);
    let page = std::fs::read_to_string(scene.join("page.html")).unwrap();
    let plant = "<p style=\"width:3000px\">wide</p><p style=\"color:#999\">faint</p><section id=\"flat\"></section><script>1</script>";
    std::fs::write(scene.join("page.html"), page.replace("</main>", &format!("{plant}</main>"))).unwrap();
    let faults = faults(scene.path(), 400, false, None);
    for words in ["wider than", "contrast", "flat has no height", "Content Security Policy"] {
        assert!(faults.iter().any(|fault| fault.contains(words)), "`{words}` is not in {faults:?}");
    }
}
