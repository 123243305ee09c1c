//! The README's first command, verbatim: the example trains on this repository's own text and beats
//! every bigram model.

use serde_json::Value;
use switchyard_tests::{Program, TIMEOUT, programs, root};

#[test]
fn the_example_ends_below_the_bigram_entropy() {
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    let arguments = ["run", "examples/gpt-source.yaml", "-o", "json", "--run-dir", run_dir.to_str().unwrap()];
    // As in the README: from the repository root, whose text it reads.
    let ended = Program::new(&programs().join("switchyard"), root(), arguments).run(TIMEOUT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let objects: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of_kind = |kind: &str| objects.iter().filter(move |object| object["kind"] == kind).collect::<Vec<_>>();
    let ready = of_kind("RunReady");
    let ranks = ready[0]["ranks"].as_array().unwrap();
    assert!(ranks.len() == 2 && ranks.iter().all(|rank| rank["transport"] == "shm"), "{ranks:?}");
    let bigram = of_kind("RunStarting")[0]["inspection"]["bigramNats"].as_f64().unwrap();
    let evaluations = of_kind("RunEvaluation");
    let last = evaluations.last().unwrap();
    let loss = last["loss"].as_f64().unwrap();
    assert_eq!(last["step"], 300);
    assert!(loss < bigram, "validation loss {loss} is not below the bigram entropy {bigram}");
    assert!(run_dir.join("model.safetensors").is_file());
}
