//! Manifests with one wrong field each.

use crate::bad_input::case::{Case, GOOD, Make, arguments, check_cases, fault, scene};
use switchyard_tests::TIMEOUT;

/// Replaces one piece of the good manifest.
const fn field(
    name: &'static str,
    [from, to]: [&'static str; 2],
    code: i32,
    expected: &'static [&'static str],
) -> Case {
    Case { name, make: Make::Replace(from, to), code, expected }
}

/// Every error shows the user's file and the line.
pub(crate) const CASES: &[Case] = &[
    field(
        "unknown field",
        ["batchSizePerProcess", "bachSizePerProcess"],
        2,
        &["SY0003", "spec.engine.bachSizePerProcess", "did you mean `batchSizePerProcess`?", "job.yaml:13"],
    ),
    field(
        "unknown field without a near name",
        ["steps: 3", "steps: 3\n    zzz: 1"],
        2,
        &["SY0003", "unknown field `zzz`", "known here:"],
    ),
    field(
        "unknown block",
        ["spec:", "spec:\n  elasticPolicy: {minNodes: 1}"],
        2,
        &["SY0003", "spec.elasticPolicy", "trainer"],
    ),
    field(
        "text instead of a number",
        ["steps: 3", "steps: many"],
        2,
        &["SY0004", "spec.engine.steps", "got", "many", "an integer"],
    ),
    field(
        "quoted number",
        ["numProcPerNode: 2", "numProcPerNode: \"2\""],
        2,
        &["SY0004", "spec.trainer.numProcPerNode", "an integer"],
    ),
    field(
        "number with a fraction instead of an integer",
        ["steps: 3", "steps: 2.5"],
        2,
        &["SY0004", "spec.engine.steps", "2.5"],
    ),
    field(
        "number instead of a decimal string",
        ["steps: 3", "steps: 3\n    optimizer: {learningRate: 0.002}"],
        2,
        &["SY0004", "spec.engine.optimizer.learningRate", "write it in quotes: \"0.002\""],
    ),
    field(
        "negative number instead of a decimal string: quotes would not help",
        ["steps: 3", "steps: 3\n    optimizer: {learningRate: -0.1}"],
        2,
        &["SY0008", "spec.engine.optimizer.learningRate", "got number -0.1", "a decimal number that is not negative"],
    ),
    field(
        "far too many nodes",
        ["cpuThreads: 1", "numNodes: 1e20"],
        2,
        &["SY0004", "spec.trainer.numNodes", "got number 1e+20", "an integer from 1 to 4096"],
    ),
    field(
        "text instead of a list",
        ["{path: data}", "{path: data, include: \"*.txt\"}"],
        2,
        &["SY0004", "spec.engine.data.include", "write a list: [\"*.txt\"]"],
    ),
    field("list instead of a block", ["{path: data}", "[data]"], 2, &["SY0004", "spec.engine.data"]),
    field("null", ["steps: 3", "steps:"], 2, &["SY0100", "spec.engine", "set exactly one of steps and epochs"]),
    field(
        "another kind of network",
        ["type: GPT", "type: RNN"],
        2,
        &["SY0005", "spec.engine.model.type", "`RNN`", "one of GPT, BERT, ResNet, MLP, Custom"],
    ),
    field("enum in small letters", ["type: GPT", "type: gpt"], 2, &["SY0005", "`gpt`", "did you mean `GPT`?"]),
    field(
        "another vocabulary",
        ["contextLength: 32", "contextLength: 32, vocabulary: Words"],
        2,
        &["SY0005", "spec.engine.model.gpt.vocabulary", "`Words`", "one of Bytes, GPT2"],
    ),
    field(
        "a vocabulary that the data has not",
        ["contextLength: 32", "contextLength: 32, vocabulary: GPT2"],
        2,
        &["SY0100", "spec.engine.data.format", "vocabulary GPT2 needs data.format Tokens"],
    ),
    field(
        "the block of another network",
        ["type: GPT", "type: ResNet"],
        2,
        &["SY0100", "spec.engine.model", "ResNet resnet"],
    ),
    field(
        "data that is not for the model",
        ["{path: data}", "{format: CIFAR10, path: data}"],
        2,
        &["SY0100", "spec.engine.data.format", "GPT and BERT take tokens", "got text \"CIFAR10\"", "job.yaml:12"],
    ),
    field(
        "options of mixed precision without it",
        ["steps: 3", "steps: 3\n    precision: {computeType: FP16}"],
        2,
        &["SY0100", "spec.engine.precision.mode", "computeType and lossScaling are for mode AMP"],
    ),
    field(
        "a number of another optimizer",
        ["steps: 3", "steps: 3\n    optimizer: {momentum: \"0.9\"}"],
        2,
        &["SY0100", "spec.engine.optimizer.momentum", "momentum is for type SGD and LARS", "got text \"0.9\""],
    ),
    field(
        "a last learning rate above the first",
        ["steps: 3", "steps: 3\n    schedule: {type: Linear, finalLearningRate: \"0.1\"}"],
        2,
        &["spec.engine.schedule.finalLearningRate", "got 0.1", "at most optimizer.learningRate, 0.001"],
    ),
    field(
        "too many communicators",
        ["steps: 3", "steps: 3\n    overlap: {communicators: 9}"],
        2,
        &["SY0006", "spec.engine.overlap.communicators", "got 9", "from 1 to 8"],
    ),
    field(
        "a volume that the template has not",
        ["engine:", "checkpoint: {volumeName: ckpt, path: /ckpt}\n  engine:"],
        2,
        &["spec.checkpoint.volumeName", "got `ckpt`", "a volume of spec.template.spec.volumes: it has none"],
    ),
    field(
        "another topology mode",
        ["engine:", "topologyPolicy: {mode: required}\n  engine:"],
        2,
        &["SY0005", "spec.topologyPolicy.mode", "did you mean `Required`?"],
    ),
    field(
        "no layers",
        ["layers: 1", "layers: 0"],
        2,
        &["SY0006", "spec.engine.model.gpt.layers", "got 0", "an integer from 1 to 256"],
    ),
    field("no steps", ["steps: 3", "steps: 0"], 2, &["SY0006", "spec.engine.steps", "got 0"]),
    field("negative number of steps", ["steps: 3", "steps: -5"], 2, &["SY0006", "spec.engine.steps", "got -5"]),
    field("negative seed", ["steps: 3", "steps: 3\n    seed: -1"], 2, &["SY0006", "spec.engine.seed", "got -1"]),
    field(
        "no samples",
        ["batchSizePerProcess: 2", "batchSizePerProcess: 0"],
        2,
        &["SY0006", "spec.engine.batchSizePerProcess", "got 0"],
    ),
    field(
        "more processes than a node takes",
        ["numProcPerNode: 2", "numProcPerNode: 65"],
        2,
        &["SY0006", "spec.trainer.numProcPerNode", "got 65", "from 1 to 64"],
    ),
    field(
        "more nodes than a job takes",
        ["numProcPerNode: 2", "numNodes: 4097"],
        2,
        &["SY0006", "spec.trainer.numNodes", "got 4097", "from 1 to 4096"],
    ),
    field(
        "a number that no integer holds",
        ["steps: 3", "steps: 99999999999999999999"],
        2,
        &["spec.engine.steps", "99999999999999999999"],
    ),
    field(
        "empty path",
        ["{path: data}", "{path: \"\"}"],
        2,
        &["SY0006", "spec.engine.data.path", "at least 1 character"],
    ),
    field(
        "no model",
        ["    model:\n      type: GPT\n      gpt: {layers: 1, hiddenSize: 32, heads: 2, contextLength: 32}\n", ""],
        2,
        &["SY0007", "spec.engine.model", "missing"],
    ),
    field(
        "no shape of the model",
        ["      gpt: {layers: 1, hiddenSize: 32, heads: 2, contextLength: 32}\n", ""],
        2,
        &["SY0100", "spec.engine.model", "type GPT needs gpt"],
    ),
    field("no path", ["{path: data}", "{format: Text}"], 2, &["SY0100", "spec.engine.data.path", "path must be set"]),
    field("no name", ["{name: bad-input}", "{namespace: default}"], 2, &["SY0007", "metadata.name", "missing"]),
    field("a name that no pod can have", ["bad-input", "Bad_Input"], 2, &["metadata.name", "Bad_Input"]),
    field(
        "a name that is too long",
        ["bad-input", "a123456789a123456789a123456789a123456789a123456789a123456789a123456789"],
        2,
        &["metadata.name"],
    ),
    field(
        "no decimal number",
        ["steps: 3", "steps: 3\n    optimizer: {learningRate: fast}"],
        2,
        &["SY0008", "spec.engine.optimizer.learningRate", "\"fast\"", "a decimal number"],
    ),
    field(
        "negative learning rate",
        ["steps: 3", "steps: 3\n    optimizer: {learningRate: \"-0.1\"}"],
        2,
        &["SY0008", "spec.engine.optimizer.learningRate", "\"-0.1\"", "not negative"],
    ),
    field(
        "no quantity",
        ["cpuThreads: 1", "resourcesPerNode: {limits: {memory: lots}}"],
        2,
        &["SY0008", "spec.trainer.resourcesPerNode.limits.memory", "lots", "a quantity such as"],
    ),
    field(
        "no memory",
        ["cpuThreads: 1", "resourcesPerNode: {limits: {memory: \"0\"}}"],
        2,
        &["spec.trainer.resourcesPerNode.limits.memory", "`0`", "greater than 0"],
    ),
    field(
        "heads do not divide",
        ["heads: 2", "heads: 5"],
        2,
        &[
            "SY0100",
            "spec.engine.model.gpt.heads",
            "heads must divide hiddenSize",
            "got integer 5",
            "hiddenSize is 32",
            "job.yaml:11",
        ],
    ),
    field(
        "steps and epochs",
        ["steps: 3", "steps: 3\n    epochs: 1"],
        2,
        &["SY0100", "exactly one of steps and epochs"],
    ),
    field("neither steps nor epochs", ["    steps: 3\n", ""], 2, &["SY0100", "exactly one of steps and epochs"]),
    field(
        "a reserved name",
        ["cpuThreads: 1", "env: [{name: SWITCHYARD_RENDEZVOUS, value: x}]"],
        2,
        &["SY0100", "spec.trainer.env[0].name", "choose another name"],
    ),
    field(
        "GPUs of another vendor",
        ["cpuThreads: 1", "resourcesPerNode: {limits: {amd.com/gpu: 8}}"],
        2,
        &["SY0100", "spec.trainer.resourcesPerNode.limits", "only cpu, memory and nvidia.com/gpu are supported"],
    ),
    field(
        "an environment name twice",
        ["cpuThreads: 1", "env: [{name: A, value: x}, {name: A, value: y}]"],
        2,
        &["SY0100", "spec.trainer.env", "the same item twice", "text \"A\" in items 0 and 1"],
    ),
    field(
        "a pattern twice",
        ["{path: data}", "{path: data, include: [a, b, a]}"],
        2,
        &["SY0100", "spec.engine.data.include", "text \"a\" in items 0 and 2", "every item once"],
    ),
    field(
        "an environment value that no process can have",
        ["cpuThreads: 1", "env: [{name: A, value: \"x\\0y\"}]"],
        2,
        &["spec.trainer.env[0].value", "NUL"],
    ),
    field(
        "unknown kernels",
        ["cpuThreads: 1", "env: [{name: SWITCHYARD_KERNEL, value: sse}]"],
        2,
        &["SWITCHYARD_KERNEL", "`sse`", "expected auto, amx, avx512bf16, avx512, avx2 or portable"],
    ),
    field(
        "an unknown transport",
        ["cpuThreads: 1", "env: [{name: SWITCHYARD_TRANSPORT, value: pigeon}]"],
        2,
        &["SWITCHYARD_TRANSPORT", "got \"pigeon\"", "expected auto, shm or tcp"],
    ),
    field(
        "a timeout that is none",
        ["cpuThreads: 1", "env: [{name: SWITCHYARD_PEER_TIMEOUT_SECONDS, value: soon}]"],
        2,
        &["SWITCHYARD_PEER_TIMEOUT_SECONDS", "got \"soon\"", "expected seconds from 0.1 to 86400"],
    ),
    field(
        "weights that no machine holds",
        ["layers: 1, hiddenSize: 32", "layers: 256, hiddenSize: 32768"],
        8,
        &["not placeable", "MiB", "smallest change that fits"],
    ),
    field(
        "warm-up longer than the run",
        ["steps: 3", "steps: 3\n    schedule: {warmupSteps: 4}"],
        2,
        &["SY0100", "spec.engine.schedule.warmupSteps", "got integer 4"],
    ),
    field(
        "too much for validation",
        ["{path: data}", "{path: data, validationFraction: \"0.9\"}"],
        2,
        &["SY0100", "spec.engine.data.validationFraction", "between 0 and 0.5", "got text \"0.9\""],
    ),
    field(
        "more threads than cores, required",
        ["cpuThreads: 1\n", "cpuThreads: 1024\n  topologyPolicy: {mode: Required}\n"],
        8,
        &["not placeable", "1024 threads", "can be used", "smallest change that fits: trainer."],
    ),
    field(
        "less memory than needed",
        ["cpuThreads: 1", "resourcesPerNode: {limits: {memory: 1Mi}}"],
        8,
        &["not placeable", "resourcesPerNode.limits.memory", "1 MiB", "smallest change that fits"],
    ),
];

#[test]
fn invalid_fields_are_refused() {
    check_cases(CASES);
}

#[test]
fn two_nodes_required_of_one_machine() {
    let case = Case {
        name: "two nodes required of one machine",
        make: Make::Scene(|scene| {
            scene.write(
                "job.yaml",
                GOOD.replace("trainer:", "topologyPolicy: {mode: Required}\n  trainer:\n    numNodes: 2"),
            );
            arguments("run job.yaml --run-dir out")
        }),
        code: 8,
        expected: &["not placeable: bad-input", "needs 2 nodes, 1 present", "trainer.numNodes: 1"],
    };
    assert_eq!(fault(&case), None);
}

#[test]
fn all_errors_in_a_manifest_are_reported_at_once() {
    let scene = scene();
    let text = GOOD.replace("steps: 3", "steps: 0\n    sed: 1").replace("layers: 1", "layers: none");
    scene.write("job.yaml", text);
    let ended = scene.switchyard(["run", "job.yaml"]).run(TIMEOUT);
    assert_eq!(ended.code, Some(2));
    for words in
        ["spec.engine.steps", "spec.engine.sed", "spec.engine.model.gpt.layers", "3 errors; nothing was started"]
    {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    scene.assert_nothing_left();
}
