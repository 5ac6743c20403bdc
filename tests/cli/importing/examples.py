"""Configurations that use every documented setting of llama-swap, written for these tests."""

FULL = """
healthCheckTimeout: 500
logLevel: warn
logToStdout: proxy
startPort: 10001
globalTTL: 300
macros:
  server: >
    /opt/llama/llama-server
    --port ${PORT}
  ctx: 4096
  args: "--ctx-size ${ctx}"
  dir: ${env.HOME}/models
  flash: true
apiKeys: [sk-secret, "${env.API_KEY_1}"]
models:
  large:
    macros: {ctx: 16384, temp: 0.7}
    cmd: |
      # ${server} and ${undefined} in a comment are not read
      ${server} \\
      --model /models/large.gguf
      ${args} --flash-attn ${flash}
      # --threads 8
      --temperature ${temp} --alias "two words"
    name: Large
    description: A large model
    env: ["CUDA_VISIBLE_DEVICES=0,1,2", "KEY=${env.SECRET}=x"]
    checkEndpoint: /ready
    ttl: 60
    unloadTimeout: 20
    useModelName: org/large
    filters:
      stripParams: "temperature, top_p, model"
      setParams: {top_k: 20, seed: null, stop: ["a", null]}
      setParamsByID:
        "${MODEL_ID}": {chat_template_kwargs: {effort: medium}}
        "${MODEL_ID}:high": {chat_template_kwargs: {effort: high}}
    aliases: [{id: gpt-4o-mini, unlisted: true}, big]
    metadata: {port: "${PORT}"}
    concurrencyLimit: 3
    sendLoadingState: false
    timeouts: {connect: 30}
  fixed:
    proxy: http://127.0.0.1:8999
    cmd: /opt/server --listen 127.0.0.1:8999 --port=8999 --seed 18999 -m ${dir}/fixed.gguf
    ttl: 0
    unlisted: true
  container:
    proxy: "http://127.0.0.1:${PORT}"
    checkEndpoint: none
    cmd: |
      docker run --name ${MODEL_ID} --rm -p ${PORT}:8080
      image --model '/models/a b.gguf'
    cmdStop: docker stop ${MODEL_ID}
  portless:
    cmd: sd-server --listen-port 9999
    env: ["ROCR_VISIBLE_DEVICES=GPU-ab"]
hooks: {on_startup: {preload: [fixed]}}
peers:
  other-swap: {proxy: "http://192.168.1.23/", models: [a, b]}
  cloud:
    proxy: https://cloud.example/api
    apiKey: ${env.CLOUD_API_KEY}
    models: [c]
    filters: {stripParams: temperature}
  paid: {proxy: "https://paid.example", apiKey: sk-literal}
"""

EVERY = """
healthCheckTimeout: 500
logLevel: warn
logRequests: true
logTimeFormat: rfc3339
logToStdout: both
metricsMaxInMemory: 50
captureBuffer: 5
store: {path: /var/lib/activity.sqlite}
ui: {activity: {session_id: [X-Session]}}
performance: {disabled: true, every: 9s}
startPort: 9000
sendLoadingState: true
includeAliasesInList: true
globalTTL: 300
unloadTimeout: 33
macros: {server: "serve --port ${PORT}"}
apiKeys: [sk-one]
upstream: {ignorePaths: ['\\.css$']}
profiles:
  night: {description: Small models only, pins: {first: second}}
selectors:
  best:
    strategy: warm
    targets: [first, second]
    settings: {spillover: 3}
    name: Best
    description: The one that is loaded
    unlisted: true
    metadata: {for: all}
  fixed-choice: {strategy: pin, targets: [uno]}
models:
  first:
    macros: {size: 2048}
    cmd: other -c ${size} --listen 7000
    cmdStop: stop ${PID}
    proxy: http://127.0.0.1:7000
    checkEndpoint: /ready
    healthCheckTimeout: 77
    ttl: 60
    unloadTimeout: 20
    unlisted: true
    useModelName: theirs
    name: First
    description: The first model
    env: [A=b]
    aliases: [uno]
    concurrencyLimit: 3
    metadata: {owner: me}
    sendLoadingState: false
    compat: {ignoreWebsockets: true}
    timeouts: {connect: 1, keepalive: 2, responseHeader: 3, tlsHandshake: 4, expectContinue: 5, idleConn: 6}
    filters:
      stripParams: top_p
      setParams: {temperature: 0.5}
      setParamsByID: {"first:high": {reasoning_effort: high}}
  second:
    cmd: ${server}
    filters: {strip_params: seed}
    capabilities: {in: [image], out: [text], tools: true, reranker: true, context: 4096}
  extra: {cmd: "${server}"}
hooks: {on_startup: {preload: [uno, ghost]}}
routing:
  router:
    use: group
    settings:
      groups:
        all: {swap: false, exclusive: false, members: [first, extra]}
        kept: {persistent: true, members: [second]}
      matrix: {vars: {f: first}, evict_costs: {f: 5}, sets: {both: f & second}}
  scheduler:
    use: fifo
    settings: {fifo: {priority: {second: 7}}}
peers:
  away:
    proxy: http://10.0.0.9
    apiKey: sk-two
    models: [third]
    timeouts: {connect: 1, keepalive: 2, responseHeader: 3, tlsHandshake: 4, expectContinue: 5, idleConn: 6}
    filters: {stripParams: "top_k, stream", setParams: {provider: {zdr: true}}}
"""

ROUTED_MATRIX = """
models:
  gemma: {cmd: "s --port ${PORT}"}
  voice: {cmd: "s --port ${PORT}"}
routing:
  router:
    use: matrix
    settings:
      matrix: {vars: {v: voice}, evict_costs: {v: 50, gemma: 3}, sets: {standard: "gemma & v"}}
"""

GROUPS = """
models:
  a: {cmd: "s --port ${PORT}"}
  b: {cmd: "s --port ${PORT}"}
  c: {cmd: "s --port ${PORT}"}
groups:
  forever: {persistent: true, swap: false, members: [a]}
  guests: {exclusive: false, swap: false, members: [b]}
  rest: {swap: true, exclusive: true, members: [c, a]}
"""

MATRIX = """
models:
  gemma: {cmd: "s --port ${PORT}"}
  voice: {cmd: "s --port ${PORT}"}
matrix:
  vars: {g: gemma, v: voice}
  evict_costs: {v: 50}
  sets: {standard: "g & v"}
"""
