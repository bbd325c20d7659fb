// Checks a PodMonitor, JSON on stdin, with the schema of the Prometheus operator's CRD, which make deploy-check has put into .deploy.
import { readFileSync } from "node:fs";
const operator = `${process.cwd()}/.deploy/node_modules/@kubernetes-models/prometheus-operator`;
const { PodMonitor } = await import(`${operator}/monitoring.coreos.com/v1/PodMonitor.js`);
const monitor = new PodMonitor(JSON.parse(readFileSync(0, "utf8")));
monitor.validate();
console.log(`podmonitor/${monitor.metadata.name} passed`);
