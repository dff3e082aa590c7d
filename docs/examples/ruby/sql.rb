# An API that asks the database itself, with the pg gem.
#
#   gem install pg webrick    # or Debian's ruby-pg and ruby-webrick
#   PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app ruby sql.rb
#   curl -i -H 'X-User: 42' localhost:3000/
require "pg"
require "webrick"

ACQUIRE = <<~SQL
  select allowed,
         least(remaining, 2147483647)::integer as remaining,
         least(ceil(extract(epoch from retry_after)), 2147483647)::integer as retry_after_seconds,
         retry_after is null as never
    from ratelimit_acquire($1::text, $2::text, $3::bigint)
SQL

# One connection, and one caller at a time. A program of many threads has a pool: the gem connection_pool.
class Limiter
  def initialize
    @mutex = Mutex.new
  end

  def acquire(key, cost)
    @mutex.synchronize do
      @conn ||= connect
      @conn.exec_params(ACQUIRE, ["api", key, cost])[0]
    rescue PG::Error
      @conn = nil # the next request connects anew
      raise
    end
  end

  private

  def connect
    conn = PG.connect(connect_timeout: 2, options: "-c lock_timeout=500")
    conn.type_map_for_results = PG::BasicTypeMapForResults.new(conn)
    conn
  end
end

limiter = Limiter.new

# What each path costs, in tokens.
COSTS = { "/" => 1, "/export" => 10 }

api = WEBrick::HTTPServer.new(BindAddress: "127.0.0.1", Port: ENV.fetch("PORT", 3000).to_i)
api.mount_proc "/" do |request, response|
  cost = COSTS[request.path]
  user = request["X-User"] # an API of yours knows whom it has authenticated
  next response.status = cost ? 401 : 404 unless cost && user

  begin
    d = limiter.acquire("user:#{user}", cost)
  rescue PG::Error => e
    warn "no decision: #{e.message}"
    next response.status = 503 # or go on without a limit: that is for you to decide
  end
  if d["allowed"]
    response.body = "hello, #{user}: #{d["remaining"]} tokens left\n"
  else
    response.status = 429
    response["Retry-After"] = d["retry_after_seconds"].to_s unless d["never"]
    response.body = "too many requests\n"
  end
end
%w[INT TERM].each { |signal| trap(signal) { api.shutdown } }
api.start
