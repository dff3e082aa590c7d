# A Rails application whose controllers are limited by a concern, on connections apart from those of its models: a grant is committed at
# once, so no transaction of a model keeps its bucket locked or gives its tokens back.
#
#   gem install rails pg webrick    # or Debian's ruby-rails, ruby-pg and ruby-webrick
#   PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app ruby rails.rb
#   curl -i -H 'X-User: 42' localhost:3000/
require "action_controller/railtie"
require "active_record" # in an application with config/database.yml its railtie
require "rack/handler/webrick"

class RateLimits < ActiveRecord::Base # app/models/rate_limits.rb
  self.abstract_class = true
  establish_connection(adapter: "postgresql", connect_timeout: 2, variables: { lock_timeout: "500ms" })
end

module RateLimited # app/controllers/concerns/rate_limited.rb
  extend ActiveSupport::Concern

  ACQUIRE = "select d.allowed, ratelimit_http_fields($1, d) as fields from ratelimit_acquire($1::text, $2::text, $3::bigint) as d"

  class_methods do
    def rate_limit(policy, cost: 1, **only, &key)
      before_action(**only) { take_tokens(policy, instance_exec(&key), cost) }
    end
  end

  private

  def take_tokens(policy, key, cost)
    d = RateLimits.connection_pool.with_connection { |db| db.exec_query(ACQUIRE, "acquire", [policy, key, cost]).first }
    response.headers.merge!(JSON.parse(d["fields"])) # RateLimit, RateLimit-Policy and Retry-After
    head :too_many_requests unless d["allowed"]
  rescue ActiveRecord::ActiveRecordError => e
    logger.error("no decision: #{e.message}")
    head :service_unavailable # or go on without a limit: that is for you to decide
  end
end

class Api < Rails::Application
  config.eager_load = false
  config.logger = Logger.new($stderr)
  config.log_level = :error
  config.secret_key_base = "of an API without cookies"
  config.hosts.clear
  routes.append do
    root to: "hello#show"
    get "export", to: "hello#export"
  end
end

class HelloController < ActionController::API
  include RateLimited

  before_action { head :unauthorized unless request.headers["X-User"] } # an API of yours knows whom it has authenticated
  rate_limit("api", only: :show) { "user:#{request.headers["X-User"]}" }
  rate_limit("api", cost: 10, only: :export) { "user:#{request.headers["X-User"]}" }

  def show = render(plain: "hello, #{request.headers["X-User"]}\n")

  def export = render(plain: "everything\n")
end

Api.initialize!
Rack::Handler::WEBrick.run(Api, Host: "127.0.0.1", Port: ENV.fetch("PORT", 3000).to_i, AccessLog: [])
