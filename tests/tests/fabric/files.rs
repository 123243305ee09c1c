//! NCCL's config file in a pod: a real shell merges the image's files with ours, and the test
//! parses the result as NCCL does.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use switchyard_fabric::MERGE_SCRIPT;

const REASONS: &str = "NCCL_IB_HCA==mlx5_0:1 (nodes 0-3): set: the ports that carry training traffic\n";

/// Parses a file like NCCL (`src/misc/param.cc`): the name ends at the first `=`, comments start in
/// column one, whitespace is kept, and the first value of a name wins.
fn as_nccl_reads(text: &str) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((name, value)) = line.split_once('=') {
            let value: String = value.chars().take(1023).collect();
            values.entry(name.to_string()).or_insert(value);
        }
    }
    values
}

/// Runs the init container's script on these files in its own root; returns the merged file and the
/// script's output.
fn merged(shell: &str, home: Option<&str>, image: Option<&str>, plan: &str) -> (String, String) {
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path.trim_start_matches('/'));
    let write = |path: &str, text: &str| {
        std::fs::create_dir_all(at(path).parent().unwrap()).unwrap();
        std::fs::write(at(path), text).unwrap();
    };
    write("/etc/switchyard/fabric-plan/nccl.conf", plan);
    write("/etc/switchyard/fabric-plan/reasons.txt", REASONS);
    std::fs::create_dir_all(at("/etc/switchyard/fabric")).unwrap();
    if let Some(text) = home {
        write("/users/own/.nccl.conf", text);
    }
    if let Some(text) = image {
        write("/etc/nccl.conf", text);
    }
    let script = MERGE_SCRIPT.replace("/etc/", &format!("{}/etc/", root.path().display()));
    let mut words = shell.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let output = command.args(words).arg("-c").arg(script).env("HOME", at("/users/own")).output().unwrap();
    assert!(output.status.success(), "{shell}");
    let text = std::fs::read_to_string(at("/etc/switchyard/fabric/nccl.conf")).unwrap();
    (text, String::from_utf8(output.stdout).unwrap())
}

#[test]
fn image_files_take_precedence_over_ours() {
    let plan = "# ours\nNCCL_SOCKET_IFNAME==eth0\nNCCL_IB_HCA==mlx5_0:1,mlx5_1:1\nNCCL_DEBUG=WARN\n";
    for shell in ["sh", "bash", "bash --posix"]
        .iter()
        .filter(|shell| Path::new("/bin").join(shell.split(' ').next().unwrap()).exists())
    {
        // The image's file lacks a trailing newline, as hand-written files often do.
        let (text, log) =
            merged(shell, Some("NCCL_DEBUG=INFO"), Some("NCCL_IB_HCA=mlx5_7\nNCCL_TOPO_FILE=/opt/topo.xml"), plan);
        assert_eq!(log, REASONS, "{shell}");
        let values = as_nccl_reads(&text);
        let value = |name: &str| values.get(name).map(String::as_str);
        assert_eq!(value("NCCL_DEBUG"), Some("INFO"), "the user's home: {text}");
        assert_eq!(value("NCCL_IB_HCA"), Some("mlx5_7"), "the image: {text}");
        assert_eq!(value("NCCL_TOPO_FILE"), Some("/opt/topo.xml"), "{text}");
        assert_eq!(value("NCCL_SOCKET_IFNAME"), Some("=eth0"), "both signs of an exact name: {text}");
    }
}

#[test]
fn without_image_files_ours_are_used() {
    let plan = "NCCL_NET=AWS Libfabric\n";
    let values = as_nccl_reads(&merged("sh", None, None, plan).0);
    assert_eq!(values, BTreeMap::from([("NCCL_NET".to_string(), "AWS Libfabric".to_string())]));
}
