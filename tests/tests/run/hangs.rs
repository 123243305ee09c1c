//! Hangs: a stuck rank is named, the job restarts or ends with a dedicated exit code, and `doctor`
//! explains what happened.

use super::{DEADLINE, fault, run, scene};
use serde_json::json;

#[test]
fn a_rank_that_stands_still_is_restarted_and_the_doctor_tells_the_story() {
    let policy = json!({"maxRestarts": 1, "progressTimeoutSeconds": 4});
    let (scene, manifest) = scene(|manifest| fault(manifest, "stall:4@1#1").with("failurePolicy", policy));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for part in
        ["rank 1 failed first", "stands still for 4 s", "reports and files after step 3", "restart 1 of 1: attempt 2"]
    {
        assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
    }
    let told = scene.switchyard(["doctor", "out", "-o", "json"]).start().wait(DEADLINE);
    assert_eq!(told.code, Some(0), "{}", told.stderr);
    let told: serde_json::Value = serde_json::from_str(&told.stdout).unwrap();
    let story = |attempt: usize| told["recorders"][attempt]["text"].as_str().unwrap_or_default();
    for part in ["rank 1 on ", " stood still for 4", "step 3", "rank 0: step 4: waiting for the all-reduce"] {
        assert!(story(0).contains(part), "{part}: {told}");
    }
    assert!(story(1).starts_with("all 2 ranks finished after step "), "{told}");
    assert_eq!(told["attempts"][0]["first"]["id"], "worker-hung", "{told}");
    scene.assert_nothing_left();
}

#[test]
fn without_a_restart_a_hang_has_a_code_of_its_own() {
    let policy = json!({"progressTimeoutSeconds": 4});
    let (scene, manifest) = scene(|manifest| fault(manifest, "stall:4@0").with("failurePolicy", policy));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(10), "{}", ended.stderr);
    assert!(ended.stderr.contains("rank 0 failed first"), "{}", ended.stderr);
    scene.assert_nothing_left();
}
