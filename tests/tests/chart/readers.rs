//! Authenticated metrics: access to the metrics of a controller with the chart's account and
//! rights.

use crate::chart::installed;
use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;
use switchyard_tests::{ControllerOptions, Daemon, TIMEOUT, found_async, http_address, page, start_controller};

/// Address of the authenticated metrics endpoint, once the controller has logged it.
fn metrics_address(controller: &Daemon) -> Option<SocketAddr> {
    let log = std::fs::read_to_string(&controller.log).ok()?;
    log.split("secure_metrics=").nth(1)?.split_whitespace().next()?.parse().ok()
}

/// Fetches the metrics; returns the status and body of a refusal.
async fn ask(address: SocketAddr, token: Option<&str>) -> Result<Result<String, (u16, String)>> {
    let mut config = kube::Config::new(format!("https://{address}").parse()?);
    config.accept_invalid_certs = true;
    config.auth_info.token = token.map(|token| token.to_string().into());
    let request = http::Request::get("/metrics").body(Vec::new())?;
    match kube::Client::try_from(config)?.request_text(request).await {
        Ok(text) => Ok(Ok(text)),
        Err(kube::Error::Api(status)) => Ok(Err((status.code, status.message))),
        Err(error) => Err(error.into()),
    }
}

#[tokio::test]
async fn only_accounts_with_the_role_can_read_metrics() -> Result<()> {
    let plane = installed();
    let options = ControllerOptions {
        // Without jobs, which a controller of another test has.
        namespace: Some("kube-public".into()),
        kubeconfig: Some(plane.controller_kubeconfig()?),
        arguments: ["--secure-metrics", "127.0.0.1:0"].map(String::from).to_vec(),
        ..ControllerOptions::default()
    };
    let controller = start_controller(plane, "readers", &options)?;
    let must = |arguments: &[&str]| {
        let ended = plane.kubectl(arguments);
        ensure!(ended.code == Some(0), "kubectl {arguments:?}: {}", ended.stderr);
        Ok(ended.stdout.trim().to_string())
    };
    let token = |account: &str| {
        must(&["create", "serviceaccount", account, "-n", "default"])?;
        must(&["create", "token", account, "-n", "default"])
    };
    let (reader, stranger) = (token("reader")?, token("stranger")?);
    let role = "--clusterrole=switchyard-metrics-reader";
    must(&["create", "clusterrolebinding", "reader", role, "--serviceaccount=default:reader"])?;
    let addresses = async || Ok(http_address(&controller).zip(metrics_address(&controller)));
    let (open, secure) = found_async("listening", TIMEOUT, addresses).await.with_context(|| controller.tail())?;
    let status = |path: &str| page(open, path).map(|page| page.lines().next().unwrap_or_default().to_string());
    assert_eq!(status("/healthz").as_deref(), Some("HTTP/1.1 200 OK"));
    assert_eq!(status("/metrics").as_deref(), Some("HTTP/1.1 404 Not Found"), "not on the plain port");
    // The API server recognises new tokens and roles with a delay.
    let text = found_async("admitted", TIMEOUT, async || Ok(ask(secure, Some(&reader)).await?.ok())).await?;
    assert!(text.contains("switchyard_queue_depth") && text.ends_with("# EOF\n"), "{text}");
    for (token, code, words) in [
        (Some(stranger.as_str()), 403, "user system:serviceaccount:default:stranger is not allowed to get /metrics"),
        (Some("made-up"), 401, "a token that the API server accepts; got an unknown token"),
        (None, 401, "a token that the API server accepts; got no token"),
    ] {
        let (status, message) = ask(secure, token).await?.err().context("was accepted")?;
        assert_eq!(status, code, "{message}");
        assert!(message.contains(words), "{message}");
    }
    Ok(())
}
