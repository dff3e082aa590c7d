<?php
// Laravel's router with a middleware that limits, on a connection apart from that of the models: a grant is committed at once, so no
// transaction of a model keeps its bucket locked or gives its tokens back. An application has the connection in config/database.php, the
// class in app/Http/Middleware, and routes with ->middleware(RateLimit::class . ':api,10'). lock_timeout is set for the role: alter role
// app set lock_timeout = '500ms'.
//
//   composer require laravel/framework    # or Debian's php-laravel-framework and php-pgsql
//   PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app php -S localhost:3000 laravel.php
//   curl -i -H 'X-User: 42' localhost:3000/
error_reporting(E_ALL & ~E_DEPRECATED); // of Laravel 8 on PHP 8.2
require file_exists('vendor/autoload.php') ? 'vendor/autoload.php' : 'Illuminate/autoload.php';

use Illuminate\Database\Capsule\Manager as DB; // in an application Illuminate\Support\Facades\DB
use Illuminate\Http\Request;
use Illuminate\Http\Response;
use Illuminate\Routing\Router;

class RateLimit
{
    private const ACQUIRE = 'select d.allowed, ratelimit_http_fields(?::text, d) as fields from ratelimit_acquire(?::text, ?::text, ?::bigint) as d';

    public function handle(Request $request, Closure $next, string $policy, int $cost = 1)
    {
        $user = $request->header('X-User'); // in an application $request->user()->id
        if (!$user) return new Response('', 401);
        try {
            $d = DB::connection('ratelimit')->selectOne(self::ACQUIRE, [$policy, $policy, "user:$user", $cost], false);
        } catch (PDOException $e) { // Laravel's QueryException is one
            error_log("no decision: {$e->getMessage()}");
            return new Response('', 503); // or go on without a limit: that is for you to decide
        }
        $response = $d->allowed ? $next($request) : new Response("too many requests\n", 429);
        $response->headers->add(json_decode($d->fields, true)); // RateLimit, RateLimit-Policy and Retry-After
        return $response;
    }
}

$db = new DB;
$db->addConnection([
    'driver' => 'pgsql', 'host' => getenv('PGHOST'), 'port' => getenv('PGPORT') ?: 5432, 'database' => getenv('PGDATABASE'),
    'username' => getenv('PGUSER'), 'password' => getenv('PGPASSWORD'), 'options' => [PDO::ATTR_TIMEOUT => 2, PDO::ATTR_PERSISTENT => true],
], 'ratelimit');
$db->setAsGlobal();

$container = new Illuminate\Container\Container;
$router = new Router(new Illuminate\Events\Dispatcher($container), $container);
$router->get('/', fn (Request $request) => "hello, {$request->header('X-User')}\n")->middleware(RateLimit::class . ':api');
$router->get('/export', fn () => "everything\n")->middleware(RateLimit::class . ':api,10');
$container->instance(Request::class, $request = Request::capture());
try {
    $router->dispatch($request)->send();
} catch (Symfony\Component\HttpKernel\Exception\NotFoundHttpException) { // an application's handler does that
    (new Response('', 404))->send();
}
