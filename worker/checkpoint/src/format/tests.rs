//! Tests of the division, of names and of manifest contents.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        shape: shape.to_vec(),
        role: Role::Weight,
        export_axes: None,
        export_names: Vec::new(),
    }
}

fn manifest() -> Manifest {
    let plan = Plan::new(vec![spec("a", &[3, 5]), spec("b", &[]), spec("c", &[7])], 2).unwrap();
    let info = CheckpointInfo {
        job: "gpt".into(),
        id: CheckpointId { attempt: 2, step: 500 },
        config: "c0ffee".into(),
        created: 1_700_000_000,
        progress: Progress::new(&json!({"scale": 0.1, "samples": u64::MAX})).unwrap(),
    };
    let shards = (0..2).map(|rank| {
        let label = ShardLabel { job: "gpt".into(), id: info.id, rank, world: 2 };
        ShardDigest { bytes: plan.shard_length(&label).unwrap(), chunks: vec![Digest::of(b"x")] }
    });
    let shards = shards.collect();
    Manifest::new(info, plan, shards).unwrap()
}

/// A manifest file whose inner object was changed, with a matching digest.
fn sealed(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut file: Value = serde_json::from_slice(&manifest().encode().unwrap()).unwrap();
    change(&mut file["manifest"]);
    let inner = file["manifest"].to_string();
    format!("{{\"digest\":\"{}\",\"manifest\":{inner}}}\n", Digest::of(inner.as_bytes())).into_bytes()
}

#[test]
fn names_map_to_one_checkpoint_each() {
    let id = CheckpointId { attempt: 2, step: 500 };
    assert_eq!(id.directory(), "step-000000500.attempt-2");
    let far = CheckpointId { attempt: u32::MAX, step: u64::MAX };
    assert_eq!([id, far].map(|id| CheckpointId::parse(&id.directory())), [Some(id), Some(far)]);
    for other in ["step-500.attempt-2", "step-000000500.attempt-02", "step-+00000500.attempt-2", "step-000000500", "x"]
    {
        assert_eq!(CheckpointId::parse(other), None, "{other}");
    }
    assert!(CheckpointId { attempt: 2, step: 1 } > CheckpointId { attempt: 1, step: 9 });
    assert!(is_ours("rank-0.safetensors.tmp") && is_ours("manifest.json"));
    assert!(!is_ours("rank-x.safetensors") && !is_ours("rank-.safetensors") && !is_ours("notes.txt"));
}

#[test]
fn a_manifest_round_trips_bit_for_bit() {
    let manifest = manifest();
    let bytes = manifest.encode().unwrap();
    assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
    let progress: Value = manifest.info().progress.read().unwrap();
    assert_eq!(progress, json!({"scale": 0.1, "samples": u64::MAX}));
}

#[test]
fn every_flipped_bit_of_a_manifest_is_detected() {
    let bytes = manifest().encode().unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(Manifest::decode(&damaged).is_err(), "bit {bit}");
    }
    for length in 0..bytes.len() {
        assert!(Manifest::decode(&bytes[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn inconsistent_manifests_are_refused_with_the_reason() {
    assert!(Manifest::decode(&sealed(|_| {})).is_ok());
    let refused = |change: fn(&mut Value), words: &[&str]| {
        let text = Manifest::decode(&sealed(change)).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}: expected {words:?}");
    };
    refused(|m| m["format"] = json!(2), &["format of the manifest: got 2; expected 1"]);
    refused(|m| m["job"] = json!(""), &["job: got \"\""]);
    refused(|m| m["job"] = json!("\u{1b}[2J"), &["job: got \"\\u{1b}[2J\""]);
    refused(|m| m["\u{1b}".repeat(900)] = json!(0), &["unknown field `????", "??? ...; expected"]);
    refused(|m| m["world"] = json!(3), &["shards: got 2; expected 3"]);
    refused(|m| m["world"] = json!(u64::MAX), &["shards: got 2"]);
    refused(|m| m["extra"] = json!(1), &["unknown field `extra`"]);
    refused(|m| m["tensors"] = json!([]), &["tensors: got none"]);
    refused(|m| m["tensors"][0]["dtype"] = json!("F16"), &["F16"]);
    refused(|m| m["tensors"][0]["name"] = json!("c"), &["`c` twice"]);
    refused(|m| m["tensors"][0]["name"] = json!(""), &["name of a tensor"]);
    refused(|m| m["tensors"][0]["name"] = json!("__metadata__"), &["__metadata__"]);
    refused(|m| m["tensors"][0]["shape"] = json!([3, 0]), &["tensor `a` shape: got [3, 0]"]);
    refused(|m| m["tensors"][0]["shape"] = json!([u32::MAX, u32::MAX, u32::MAX]), &["tensor `a` shape"]);
    refused(|m| m["tensors"][0]["shape"] = json!([3, 4]), &["tensor `a` pieces"]);
    refused(|m| m["tensors"][0]["shape"] = json!([3, 6]), &["tensor `a` pieces: got 15 numbers; expected all 18"]);
    refused(|m| m["tensors"][0]["exportAxes"] = json!([0, 0]), &["tensor `a` exportAxes: got [0, 0]"]);
    refused(
        |m| m["tensors"][0]["exportNames"] = json!(["x", "y"]),
        &["tensor `a` exportNames: got 2; expected a number that divides 3"],
    );
    refused(|m| m["tensors"][0]["exportNames"] = json!([""]), &["tensor `a` exportNames: got \"\""]);
    refused(|m| m["tensors"][0]["exportNames"] = json!(["x", "y", "x"]), &["tensor `a` exportNames: got `x` twice"]);
    refused(|m| m["tensors"][0]["exportNames"] = json!(["b"]), &["exportNames: got `b` twice"]);
    refused(|m| m["tensors"][0]["pieces"][1]["offset"] = json!(5), &["tensor `a` pieces"]);
    refused(|m| m["tensors"][0]["pieces"][1]["len"] = json!(u64::MAX), &["tensor `a` pieces"]);
    refused(|m| m["tensors"][0]["pieces"][1]["shard"] = json!(0), &["got shard 0; expected one from 1 to 1"]);
    refused(|m| m["tensors"][1]["pieces"] = json!([]), &["tensor `b` pieces: got 0 numbers; expected all 1"]);
    refused(|m| m["tensors"][2]["pieces"] = json!([]), &["tensor `c` pieces: got 0 numbers; expected all 7"]);
    refused(|m| m["tensors"][2]["pieces"][0]["shard"] = json!(2), &["tensor `c` pieces: got shard 2"]);
    refused(|m| m["tensors"][2]["pieces"][0]["shard"] = json!(0), &["shard 0 bytes: got"]);
    refused(|m| m["shards"][1]["bytes"] = json!(8), &["shard 1 bytes: got 8"]);
    refused(|m| m["shards"][1]["chunks"] = json!([]), &["shard 1 chunks: got 0; expected 1"]);
    refused(|m| m["shards"][1]["chunks"][0] = json!("FF"), &["digest of 32 digits"]);
}

#[test]
fn a_plan_refuses_invalid_tensors() {
    let refused = |tensors: Vec<TensorSpec>, world| Plan::new(tensors, world).unwrap_err().to_string();
    assert_eq!(refused(vec![spec("a", &[1])], 0), "world: got 0; expected 1 to 65536 ranks");
    assert!(refused(vec![], 1).contains("expected at least one"));
    assert!(refused(vec![spec("a", &[1]), spec("a", &[2])], 1).contains("`a` twice"));
    assert!(refused(vec![spec("a", &[1 << 47]), spec("b", &[1 << 47]), spec("c", &[1])], 1).contains("at most"));
}

#[test]
fn private_tensors_are_whole_in_the_shard_of_their_rank() {
    let private = |rank: usize| vec![spec(&format!("m.rank-{rank}"), &[5, rank + 1])];
    let shared = vec![spec("a", &[3, 5]), spec("c", &[7])];
    let plan = Plan::with_private(shared.clone(), (0..3).map(private).collect()).unwrap();
    for shard in 0..3 {
        let last = plan.pieces(shard).last().unwrap();
        assert_eq!(plan.tensors()[last.tensor], private(shard)[0]);
        assert_eq!(last.range, 0..5 * (shard + 1));
        assert_eq!(plan.pieces(shard).iter().filter(|piece| piece.tensor >= shared.len()).count(), 1);
    }
    let mut pieces = vec![Vec::new(); plan.tensors().len()];
    for shard in 0..3 {
        plan.pieces(shard).iter().for_each(|piece| pieces[piece.tensor].push((shard, piece.range.clone())));
    }
    assert_eq!(Plan::from_pieces(plan.tensors().to_vec(), 3, pieces), Ok(plan));
    let text = Plan::with_private(shared, vec![vec![spec("a", &[1])]]).unwrap_err().to_string();
    assert!(text.contains("`a` twice"), "{text}");
}

#[test]
fn a_run_resumes_only_with_matching_tensors() {
    let manifest = manifest();
    let mut wanted = manifest.plan().tensors().to_vec();
    wanted.reverse();
    assert_eq!(manifest.check_tensors(&wanted), Ok(()));
    let text = |wanted: &[TensorSpec]| manifest.check_tensors(wanted).unwrap_err().to_string();
    assert_eq!(text(&wanted[1..]), "tensor: got `c`; expected only those that this run has");
    wanted[0].shape = vec![8];
    assert_eq!(text(&wanted), "tensor `c`: got Weight [7]; expected Weight [8]");
    wanted[0].name = "d".into();
    assert_eq!(text(&wanted), "tensor `d`: got nothing; expected Weight [8]");
}

proptest! {
    #[test]
    fn every_element_is_in_exactly_one_shard(sizes in prop::collection::vec(1_usize..200, 1..12), world in 1_usize..40) {
        let tensors: Vec<TensorSpec> =
            sizes.iter().enumerate().map(|(index, size)| spec(&format!("t{index}"), &[*size])).collect();
        let plan = Plan::new(tensors.clone(), world).unwrap();
        let mut next = (0, 0);
        let total: usize = sizes.iter().sum();
        for shard in 0..world {
            let numbers: usize = plan.pieces(shard).iter().map(|piece| piece.range.len()).sum();
            prop_assert!(numbers.abs_diff(total / world) <= 1, "{numbers} of {total} in shard {shard} of {world}");
            for piece in plan.pieces(shard) {
                prop_assert_eq!((piece.tensor, piece.range.start), next);
                let ends = piece.range.end == sizes[piece.tensor];
                next = if ends { (piece.tensor + 1, 0) } else { (piece.tensor, piece.range.end) };
            }
        }
        prop_assert_eq!(next, (sizes.len(), 0));
        // The pieces as stored in the manifest give the same plan.
        let mut pieces = vec![Vec::new(); sizes.len()];
        for shard in 0..world {
            plan.pieces(shard).iter().for_each(|piece| pieces[piece.tensor].push((shard, piece.range.clone())));
        }
        prop_assert_eq!(Plan::from_pieces(tensors, world, pieces), Ok(plan));
    }
}
