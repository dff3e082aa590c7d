# An API that asks pgratelimit's server over JSON. Of gems it needs webrick, the HTTP server.
#
#   gem install webrick    # or Debian's ruby-webrick
#   ruby json.rb
#   curl -i -H 'X-User: 42' localhost:3000/
require "json"
require "net/http"
require "webrick"

SERVER = URI(ENV.fetch("RATELIMIT_URL", "http://localhost:8080"))
TOKEN = ENV["RATELIMIT_TOKEN"] # one of the server's TOKENS, if it has any

def acquire(key, cost)
  headers = { "Content-Type" => "application/json" }
  headers["Authorization"] = "Bearer #{TOKEN}" if TOKEN
  options = { use_ssl: SERVER.scheme == "https", open_timeout: 1, read_timeout: 1 }
  Net::HTTP.start(SERVER.host, SERVER.port, **options) do |http|
    response = http.post("/v1/acquire", JSON.generate(policy: "api", key: key, cost: cost), headers)
    raise "pgratelimit: #{response.body}" unless response.is_a?(Net::HTTPSuccess)

    JSON.parse(response.body)
  end
end

# What each path costs, in tokens.
COSTS = { "/" => 1, "/export" => 10 }

api = WEBrick::HTTPServer.new(BindAddress: "127.0.0.1", Port: ENV.fetch("PORT", 3000).to_i)
api.mount_proc "/" do |request, response|
  cost = COSTS[request.path]
  user = request["X-User"] # an API of yours knows whom it has authenticated
  next response.status = cost ? 401 : 404 unless cost && user

  begin
    d = acquire("user:#{user}", cost)
  rescue StandardError => e
    warn "no decision: #{e.message}"
    next response.status = 503 # or go on without a limit: that is for you to decide
  end
  if d["allowed"]
    response.body = "hello, #{user}: #{d["remaining"]} tokens left\n"
  else
    response.status = 429
    # Nil means that no wait helps: the cost exceeds the capacity, or nothing refills the bucket.
    response["Retry-After"] = d["retry_after"].ceil.to_s if d["retry_after"]
    response.body = "too many requests\n"
  end
end
%w[INT TERM].each { |signal| trap(signal) { api.shutdown } }
api.start
