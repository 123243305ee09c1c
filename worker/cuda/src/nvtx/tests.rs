use super::{
    CALLBACKS, CORE, Callbacks, FUNCTIONS, MAX_FUNCTIONS, RANGE_POP, RANGE_PUSH, VERSION, VERSION_INFO, VersionInfo,
    attach, is_attached, range,
};
use crate::header::{Header, fetched};
use std::fmt::{Display, Formatter};
use std::mem::offset_of;

/// Our constants and layouts as conditions on the header.
fn conditions() -> Vec<String> {
    let modules = ["CORE", "CUDA", "OPENCL", "CUDART", "CORE2", "SYNC"];
    let sizes = modules.iter().enumerate().flat_map(|(index, module)| {
        let number = index + 1;
        [
            format!("NVTX_CB_MODULE_{module} == {number}"),
            format!("NVTX_CBID_{module}_SIZE == {}", FUNCTIONS[number]),
            format!("NVTX_CBID_{module}_SIZE < {MAX_FUNCTIONS}"),
        ]
    });
    let numbers = [
        ("NVTX_CB_MODULE_SIZE", FUNCTIONS.len()),
        ("NVTX_CB_MODULE_CORE", CORE),
        ("NVTX_CBID_CORE_RangePushA", RANGE_PUSH),
        ("NVTX_CBID_CORE_RangePop", RANGE_POP),
        ("NVTX_ETID_CALLBACKS", CALLBACKS as usize),
        ("NVTX_ETID_VERSIONINFO", VERSION_INFO as usize),
        ("NVTX_VERSION", VERSION as usize),
        ("sizeof(NvtxExportTableCallbacks)", size_of::<Callbacks>()),
        ("offsetof(NvtxExportTableCallbacks, GetModuleFunctionTable)", offset_of!(Callbacks, table)),
        ("sizeof(NvtxExportTableVersionInfo)", size_of::<VersionInfo>()),
        ("offsetof(NvtxExportTableVersionInfo, version)", offset_of!(VersionInfo, version)),
        ("offsetof(NvtxExportTableVersionInfo, SetInjectionNvtxVersion)", offset_of!(VersionInfo, set_version)),
    ];
    sizes.chain(numbers.map(|(name, value)| format!("{name} == {value}"))).collect()
}

#[test]
fn tables_match_the_header() {
    let folders = [fetched("nvtx-header", "cargo xtask data cuda")];
    let header = Header { name: "nvtx3/nvToolsExt.h", folders: &folders };
    let (is_good, text) = header.compiled(&conditions(), &[]);
    assert!(is_good, "{text}");
    let (is_good, text) = header.compiled(&["NVTX_CBID_CORE_RangePushA == 10".to_owned()], &[]);
    assert!(!is_good && text.contains("NVTX_CBID_CORE_RangePushA == 10"), "{text}");
}

#[test]
fn without_a_tool_nothing_is_opened_and_no_name_is_formatted() {
    struct Name;
    impl Display for Name {
        fn fmt(&self, _: &mut Formatter<'_>) -> std::fmt::Result {
            panic!("nobody reads it")
        }
    }
    // Nothing else in this process attaches a tool.
    assert_eq!(attach(|_| None), Ok(false));
    assert!(!is_attached());
    drop(range(Name));
}
