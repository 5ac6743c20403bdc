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
