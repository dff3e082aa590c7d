<?php
// An API that asks the database itself, with PDO.
//
//   PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app php -S localhost:3000 sql.php
//   curl -i -H 'X-User: 42' localhost:3000/

function acquire(string $key, int $cost): array
{
    // A persistent connection outlives the request, for the next one of this process.
    $dsn = "pgsql:connect_timeout=2;options='-c lock_timeout=500'";
    $db = new PDO($dsn, getenv('PGUSER') ?: null, getenv('PGPASSWORD') ?: null, [PDO::ATTR_PERSISTENT => true]);
    $acquire = $db->prepare('select allowed,
       least(remaining, 2147483647)::integer as remaining,
       least(ceil(extract(epoch from retry_after)), 2147483647)::integer as retry_after_seconds,
       retry_after is null as never
  from ratelimit_acquire(?::text, ?::text, ?::bigint)');
    $acquire->execute(['api', $key, $cost]);
    return $acquire->fetch(PDO::FETCH_ASSOC);
}

// What each path costs, in tokens.
$cost = ['/' => 1, '/export' => 10][$_SERVER['REQUEST_URI']] ?? null;
$user = $_SERVER['HTTP_X_USER'] ?? null; // an API of yours knows whom it has authenticated
if (!$cost || !$user) {
    http_response_code($cost ? 401 : 404);
    return;
}
try {
    $d = acquire("user:$user", $cost);
} catch (PDOException $e) {
    error_log("no decision: {$e->getMessage()}");
    http_response_code(503); // or go on without a limit: that is for you to decide
    return;
}
if (!$d['allowed']) {
    http_response_code(429);
    if (!$d['never']) header('Retry-After: ' . $d['retry_after_seconds']);
    echo "too many requests\n";
    return;
}
echo "hello, $user: {$d['remaining']} tokens left\n";
